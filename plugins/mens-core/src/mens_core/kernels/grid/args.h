// The constants of each grid kernel: fields of four bytes, so that a host packs them without padding.
#pragma once
#include "../sizes.h"

namespace vox {

enum { kGroup = 128 };  // threads of a group, in every kernel

struct ElementwiseArgs {  // thread element
  int32_t rows;
  int32_t width;
  float value;  // of softcap, scale and such
};

struct FunctionArgs {  // thread element
  int32_t elements;
  int32_t which;  // 0 exp, 1 log, 2 silu, 3 gelu, 4 tanh
};

struct WidenArgs {  // thread element
  int32_t elements;
  int32_t add_one;
  float one;  // told at run time: a compiler drops a multiplication by a 1 it knows, and the flush with it
};

struct EmbedArgs {  // thread (column, row)
  int32_t columns;
  float scale;
};

struct LinearArgs {  // thread (output, row)
  int32_t outputs;
  int32_t columns;
};

enum {
  kTall = 16,         // rows of a product that a group makes side by side
  kTallChunk = 2048,  // kTall of kChunk terms
  kTallCodes = 4096,  // kTall of the codes of a super-block
  kTallScales = 64,   // kTall of the scales of a chunk
};

struct TallArgs {  // group (columns, kTall rows); in the order of the result
  int32_t rows;
  int32_t terms;    // of a row of the left side
  int32_t columns;  // of the result
  int32_t first;    // of the terms whose weights are there: whole chunks, unless they are the last
  int32_t end;
};

struct QuantiseArgs {  // thread (block of a row, row)
  int32_t columns;
};

struct NormArgs {  // group (head, row)
  int32_t heads;
  int32_t width;
  float eps;
};

struct RopeArgs {  // thread (pair of a row's heads, row)
  int32_t heads;
  int32_t pairs;
};

struct KvAppendArgs {  // also of kv_take: thread (channel of a row's heads, row)
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_stride;
  int32_t blocks_per_sequence;
};

struct AttentionArgs {  // group (head, row)
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_stride;
  int32_t blocks_per_sequence;
  int32_t window;  // 0: everything before
  float scale;
  float softcap;  // 0: none
};

struct RowArgs {  // group row, or thread (element, row)
  int32_t width;
};

struct PenaliseArgs {  // thread token
  int32_t width;
  int32_t row;
  int32_t count;
};

struct TokenWeightsArgs {  // thread element
  int32_t width;
  int32_t row;
  float temperature;
};

// --- training ----------------------------------------------------------------------------------

enum {
  kSide = 8,  // queries or keys that a group of attention's backward takes side by side
  kSideBlock = 1024,  // kSide by the kBlock positions of a block
  kPiece = 32,  // terms of a chunk that a group reads at once
  kPieces = 4224,  // kPiece of kGroup chunks, each with one place more
};

struct ProductsArgs {  // group (wide columns, kTall tall ones of an example)
  int32_t tall;
  int32_t wide;
  int32_t tiles;          // of tall
  int32_t is_wide_first;  // of the result
  int32_t stride;         // elements from one example's result to the next
};

struct TurnArgs {  // thread (row, column)
  int32_t rows;
  int32_t width;
};

struct AttentionBackwardArgs {  // group (head, item)
  int32_t rows;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t window;  // 0: everything before
  float scale;
  float softcap;  // 0: none
};

struct ChunksArgs {  // group (kGroup chunks, row), or group row
  int32_t width;
  int32_t chunks;  // of a row
};

struct SumsArgs {  // thread (element, sum)
  int32_t width;
  int32_t stride;  // elements from one example's result to the next
};

struct DropoutArgs {  // thread (four elements, row)
  int32_t width;
  int32_t seed_low;
  int32_t seed_high;
  int32_t stream;  // words 2 and 3 of the counter
  int32_t step;
  int32_t threshold;  // a word below it drops its element
  float factor;
};

struct AdamWArgs {  // thread element
  int32_t rows;
  int32_t width;
  float learning_rate;
  float beta1;
  float one_minus_beta1;
  float beta2;
  float one_minus_beta2;
  float eps;
  float decay;
  float correction1;
  float correction2;
};

struct JoinArgs {  // thread element
  int32_t elements;
  int32_t first;  // of the result
};

}  // namespace vox
