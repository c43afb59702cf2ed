// The six quantised weight formats: sizes in the file, and where the packed form keeps each part.
//
// Packed form: rows in groups of 16, and a group is one stream of bytes in the order the kernels
// read it, so that decoding is one sequential read. The codes of one k-group (4 consecutive columns)
// of the 16 rows are 64 bytes, [row][column]: what one 16-lane integer dot wants. Bits per weight
// stay those of the file; only the 6-bit scales of Q4_K and Q5_K are widened to bytes. Rows missing
// from the last group are zero, and never stored.
//
// Blocks of 32 come in chunks of four: the binary16 scales of the chunk (32 bytes a block, padded to
// a cache line), then one record per block. A super-block is one record that starts with its scales.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace vox {
namespace quant {

constexpr int kGroupRows = 16;
constexpr int kKGroupBytes = 64;  // 16 rows x 4 columns, one byte each
constexpr int kChunkBlocks = 4;   // blocks of 32 in a chunk of 128

// The last two are Q8_0 in another packing: a matrix of scales and the upper four bits of all codes, and behind it one
// of the lower four bits. A search for the greatest output (quant_choose.h) reads little more than the first.
enum Format : int32_t {
  kQ8_0 = 0, kQ5_0 = 1, kQ4_0 = 2, kQ4_K = 3, kQ5_K = 4, kQ6_K = 5, kQ8_0Upper = 6, kQ8_0Lower = 7
};

struct Layout {
  int32_t block;         // columns per block of weights, and of activations
  int32_t file_bytes;    // one block of one row in the file
  int32_t record_bytes;  // one block of 16 rows in the packed form; a multiple of 64
  int32_t scale_bytes;   // of a block of 16 rows outside its record
  int32_t lower_bytes;   // of a block of 16 rows in the matrix behind this one
};

// Offsets inside a record, in the order of reading. `high` holds the bits of a code above its nibble.
struct RecordQ8_0 {
  enum { codes = 0, bytes = 512 };
};
// Nibbles as those of Q4_0; code + 128 is 16 * upper + lower.
struct RecordQ8_0Half {
  enum { bytes = 256 };
};
struct RecordQ5_0 {
  enum { high = 0, codes = 64, bytes = 320 };
};
struct RecordQ4_0 {
  enum { codes = 0, bytes = 256 };
};
struct RecordQ4_K {
  enum { d = 0, dmin = 32, scales = 64, mins = 192, parts = 320, part_bytes = 512, bytes = 320 + 4 * 512 };
};
struct RecordQ5_K {
  enum { d = 0, dmin = 32, scales = 64, mins = 192, parts = 320, part_bytes = 640, bytes = 320 + 4 * 640 };
  enum { part_high = 0, part_codes = 128 };
};
struct RecordQ6_K {
  enum { d = 0, parts = 64, part_bytes = 832, bytes = 64 + 4 * 832 };
  enum { part_scales = 0, part_high = 64, part_codes = 320 };
};

static constexpr Layout layout_of(int32_t format) {
  switch (format) {
    case kQ8_0: return {32, 34, RecordQ8_0::bytes, 32, 0};
    case kQ5_0: return {32, 22, RecordQ5_0::bytes, 32, 0};
    case kQ4_0: return {32, 18, RecordQ4_0::bytes, 32, 0};
    case kQ4_K: return {256, 144, RecordQ4_K::bytes, 0, 0};
    case kQ5_K: return {256, 176, RecordQ5_K::bytes, 0, 0};
    case kQ6_K: return {256, 210, RecordQ6_K::bytes, 0, 0};
    case kQ8_0Upper: return {32, 34, RecordQ8_0Half::bytes, 32, RecordQ8_0Half::bytes};
    case kQ8_0Lower: return {32, 34, RecordQ8_0Half::bytes, 0, 0};
    default: return {0, 0, 0, 0, 0};
  }
}

// The scales of a chunk of `blocks` blocks of 32.
static constexpr int64_t chunk_scale_bytes(int64_t blocks) { return (32 * blocks + 63) / 64 * 64; }

static constexpr int64_t group_bytes(Layout l, int64_t blocks) {
  const int64_t records = l.record_bytes * blocks;
  if (l.scale_bytes == 0) return records;
  return records + blocks / kChunkBlocks * chunk_scale_bytes(kChunkBlocks) + chunk_scale_bytes(blocks % kChunkBlocks);
}

// Where block b of a group of `blocks` lies: its first scales (of row 0), and its record.
struct Place {
  int64_t scales, record;
};
static constexpr Place place_of(Layout l, int64_t blocks, int64_t b) {
  if (l.scale_bytes == 0) return {b * l.record_bytes, b * l.record_bytes};
  const int64_t first = b / kChunkBlocks * kChunkBlocks;
  const int64_t in_chunk = blocks - first < kChunkBlocks ? blocks - first : kChunkBlocks;
  const int64_t chunk = first * l.record_bytes + first / kChunkBlocks * chunk_scale_bytes(kChunkBlocks);
  return {chunk + 32 * (b - first), chunk + chunk_scale_bytes(in_chunk) + (b - first) * l.record_bytes};
}

// What is kept of an activation block beside its int8 codes. Sums are negated: a format whose codes
// are stored with an offset starts its integer sum at offset * -sum. Of super-blocks Q6_K alone has an offset, 32.
struct Block32 {
  float d;
  int32_t negative_sum;
};
struct Block256 {
  float d;
  int16_t sum32[8];            // of each 32 codes; magnitude at most 4064
  int32_t start16[16];         // of each 16 codes: -32 times their sum
};

template <int BLOCK>
struct BlockOfColumns {
  using Kept = Block256;
};
template <>
struct BlockOfColumns<32> {
  using Kept = Block32;
};
template <int BLOCK>
using BlockOf = typename BlockOfColumns<BLOCK>::Kept;

static constexpr int64_t groups_of(int64_t rows) { return (rows + kGroupRows - 1) / kGroupRows; }
// Where the lower half of a group's records lies, if the format has one: matrix behind matrix.
static constexpr int64_t lower_of(Layout l, int64_t rows, int64_t blocks, int64_t group) {
  return groups_of(rows) * group_bytes(l, blocks) + group * blocks * l.lower_bytes;
}

// Quantised activations: rows in panels of four, so that a tile of twelve rows walks three pointers.
// A panel of w rows (four, or what is left) holds codes [columns / 4][w][4] and blocks
// [columns / block][w]; panels follow each other, all codes first.
constexpr int kPanelRows = 4;

static constexpr int64_t activation_codes_bytes(int64_t rows, int64_t columns) { return (rows * columns + 63) / 64 * 64; }
static constexpr int64_t activation_bytes(int32_t block, int64_t rows, int64_t columns) {
  return activation_codes_bytes(rows, columns) +
         rows * (columns / block) * (int64_t)(block == 32 ? sizeof(Block32) : sizeof(Block256));
}

// y [rows][outputs] = x W^T. Parts are (rows of x by kRowsPerPart) times (groups of W), groups fastest.
constexpr int64_t kRowsPerPart = 96;  // a multiple of the tiles of 4, 8 and 12; x of one part stays in a core's cache
// The greatest outputs of some groups for each row, lane by lane: values, and the groups that they are of, as bits.
constexpr int64_t kHighestRows = 16;
struct Highest {
  float values[kHighestRows][kGroupRows], groups[kHighestRows][kGroupRows];
};
struct LinearTask {
  int32_t format;
  const uint8_t* packed;
  int64_t outputs, columns;
  const int8_t* codes;
  const void* blocks;
  int64_t rows;
  float* y;
  Highest* highest = nullptr;  // takes what else would be written to y
};
// Two products of one x and as many outputs, and their gate; parts as those of LinearTask.
struct GatedTask {
  LinearTask gate, up;
  bool is_silu;
  float* out;  // [rows][outputs]
};

// The id of the greatest output of each row, of a matrix in two halves (quant_choose.h).
struct Reach {
  float scale;     // d_a of a block of activations
  float radius;    // of twice the estimate, for a weight scale of 1; NaN: not a value that can be estimated
  int32_t offset;  // that twice the estimate's integer begins with
};
// 64 bytes of a group's lower half, k-groups `pair` and `pair` + 4 of a block, and what is multiplied with them.
struct Line {
  int32_t block, pair;
  int32_t low, high;  // four codes of x each
  int32_t offset;     // -15 times the sum of the eight
  float scale;        // d_a
  float radius;       // what a bound has for these eight: 15 d_a sum |q|
};
struct Best {
  float value;
  int32_t id;
};
constexpr int64_t kChooseGroups = 64;  // of a part
constexpr int64_t kChooseLines = 16;   // that are looked at before all of a group
struct ChooseTask {
  const uint8_t* packed;
  int64_t outputs, columns;
  const float* x;
  int64_t rows;
  uint8_t* activations;  // [rows][activation_bytes(32, 1, columns)]: each row a panel of its own
  Reach* reach;          // [rows][blocks]
  Line* lines;           // [rows][kChooseLines]: those with the greatest radius, as many as there are
  float* bounds;         // [rows][groups][16]: twice an upper bound of each output
  Best* estimates;       // [parts][rows]: the highest estimate, and its group
  float* floors;         // [rows]: an output that is there
  Best* found;           // [parts][rows]: the greatest output of those that were looked at; id -1: none was
  int64_t* searched;     // [parts]: groups whose outputs were computed
};

// The greatest output of each row of a product, which are all computed and not kept. Parts are kGreatestGroups groups.
constexpr int64_t kGreatestGroups = 32;
struct GreatestTask {
  LinearTask product;
  Best* found;  // [parts][rows]
};

// Parts are panels.
struct ActivationTask {
  int32_t block;
  const float* x;
  int64_t rows, columns;
  int8_t* codes;
  void* blocks;
};

}  // namespace quant
}  // namespace vox
