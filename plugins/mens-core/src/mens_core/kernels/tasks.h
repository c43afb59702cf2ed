// What a kernel is told: plain data, the same on every lane.
#pragma once
#include "sizes.h"

namespace vox {

constexpr int64_t kPanel = 16;   // columns of a packed weight that lie side by side

enum class Format : int32_t { f32 = 0, f16 = 1, bf16 = 2, bf16_compact = 3 };

// Elementwise operators work on the flat array in parts of this many elements.
constexpr int64_t kElementsPerPart = 1024;

struct ElementwiseTask {
  const float* a;
  const float* b;  // null for operators of one argument
  float* out;
  int64_t elements;
  int64_t width;   // of a row, to name the row that is not finite
  float constant;  // softcap's cap
};

// A float weight [outputs, inputs], packed [outputs / 16][inputs][16] and padded with zero outputs; bf16_compact as
// compact_layout.h says.
struct PackedWeight {
  Format format;
  const void* panels;
  int64_t outputs;
  int64_t inputs;
};

struct PackTask {  // parts are panels
  Format format;
  const void* source;  // row-major
  void* panels;
  int64_t outputs;
  int64_t inputs;
};

// Into bf16_compact: first what each panel needs, then, once it is known how many columns are kept, the panels.
struct CompactMeasureTask {  // parts are panels
  const void* source;  // bf16, row-major
  int64_t outputs, inputs;
  uint8_t* tables;  // [panels][16]
  int64_t* kept;    // [panels]: kept columns of each
};
struct CompactPackTask {  // parts are panels
  const void* source;
  int64_t outputs, inputs;
  const uint8_t* tables;
  const int64_t* firsts;  // [panels]: kept columns of the panels before
  void* packed;
};

struct WidenTask {  // parts as elementwise
  Format format;
  const void* source;
  float* out;
  int64_t elements;
  bool add_one;
  float one;  // told at run time: a compiler drops a multiplication by a 1 it knows, and the flush with it
};

struct LinearTask {  // parts are (group of panels, block of rows)
  PackedWeight weight;
  const float* x;
  float* out;
  int64_t rows;
  int64_t rows_per_part;
  int64_t row_parts;
};

struct EmbedTask {  // parts are rows
  PackedWeight table;
  const int32_t* token_ids;
  float scale;
  float* out;
};

struct NormTask {  // parts are groups of kNormRows rows
  const float* x;
  const float* weight;
  float* out;
  int64_t rows;
  int64_t width;
  int64_t rows_per_fault;  // heads of a row: a fault names the row of the step
  float eps;
};
constexpr int64_t kNormRows = 8;

struct RopeTask {  // parts are rows
  const float* x;
  float* out;
  const float* table;    // [slot][128][2][pairs]: cosines, then sines
  const int32_t* slots;  // where each block of 128 positions is in `table`
  const int32_t* positions;
  int64_t heads;
  int64_t pairs;
};

struct RotaryTask {  // parts are positions
  const uint64_t* frequencies;  // [pairs][2]: low and high half of floor(turns * 2^128)
  uint64_t factor_low, factor_high;  // the multiplier M / 2^64
  int64_t first_position;
  int64_t pairs;
  float* table;  // [position][2][pairs]
};

// The KV cache of one layer: keys [block][kv_heads][head_dim][128], transposed so that scores
// vectorise over positions, values [block][kv_heads][128][value_stride].
struct KvLayer {
  float* keys;
  float* values;
  int64_t kv_heads;
  int64_t head_dim;
  int64_t value_stride;  // head_dim rounded up to 16
};

// Which rows belong to which sequence, and where its blocks are.
struct Rows {
  const int32_t* positions;
  const int32_t* starts;
  const int32_t* block_tables;
  int64_t sequences;
  int64_t blocks_per_sequence;
};

struct KvAppendTask {  // parts are rows
  KvLayer layer;
  Rows rows;
  const float* k;
  const float* v;
};

// Some consecutive rows of one sequence, some heads of one KV head's group.
struct AttentionItem {
  int32_t sequence;
  int32_t first_row, end_row;
  int32_t kv_head;
  int32_t first_head, end_head;
};
constexpr int64_t kAttentionRows = 64;  // of query vectors in an item, at most

struct AttentionTask {  // parts are items
  KvLayer layer;
  Rows rows;
  const AttentionItem* items;
  const float* q;
  float* out;
  int64_t heads;
  float scale;
  int64_t window;  // 0: everything before
  float softcap;   // 0: none
  float* m;        // [rows][heads] of what backward needs; both null when nobody asks
  float* l;
};

struct ArgmaxTask {  // parts are rows
  const float* x;
  int64_t width;
  int32_t* out;
};

struct RowMaxTask {  // parts are rows
  const float* x;
  int64_t width;
  float* out;
};

struct TokenWeightsTask {  // parts as elementwise
  const float* x;
  int64_t width;
  float max;
  float temperature;
  uint64_t* out;
};

struct PenaliseTask {  // one part
  float* logits;
  const int32_t* token_ids;
  int64_t count;
  const float* repetition;
  const float* subtract;
};

struct LogNormaliserTask {  // parts are rows
  const float* x;
  int64_t width;
  float* out;
};

}  // namespace vox
