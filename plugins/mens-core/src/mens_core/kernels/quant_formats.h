// The six quantised weight formats: sizes in the file, and where the packed form keeps each part.
//
// Packed form: rows in groups of 16. A group is one contiguous piece of memory: first the binary16
// scales of all its blocks (padded to a cache line), then one record per block. In a record the
// codes of one k-group (4 consecutive columns) of the 16 rows are 64 bytes, [row][column]: what one
// 16-lane integer dot wants. Bits per weight stay those of the file; only the 6-bit scales of Q4_K
// and Q5_K are widened to bytes. Rows missing from the last group are zero, and never stored.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace vox {
namespace quant {

constexpr int kGroupRows = 16;
constexpr int kKGroupBytes = 64;  // 16 rows x 4 columns, one byte each
constexpr int kChunkBlocks = 4;   // blocks of 32 in a chunk of 128

enum Format : int32_t { kQ8_0 = 0, kQ5_0 = 1, kQ4_0 = 2, kQ4_K = 3, kQ5_K = 4, kQ6_K = 5 };

struct Layout {
  int32_t block;         // columns per block of weights, and of activations
  int32_t file_bytes;    // one block of one row in the file
  int32_t scale_bytes;   // one block of 16 rows: the binary16 scales
  int32_t record_bytes;  // one block of 16 rows: everything else; a multiple of 64
};

// Offsets inside a record.
struct RecordQ8_0 {
  enum { codes = 0, bytes = 512 };
};
struct RecordQ5_0 {
  enum { codes = 0, high = 256, bytes = 320 };
};
struct RecordQ4_0 {
  enum { codes = 0, bytes = 256 };
};
struct RecordQ4_K {
  enum { codes = 0, scales = 2048, mins = 2176, bytes = 2304 };
};
struct RecordQ5_K {
  enum { codes = 0, high = 2048, scales = 2560, mins = 2688, bytes = 2816 };
};
struct RecordQ6_K {
  enum { codes = 0, high = 2048, scales = 3072, bytes = 3328 };
};

static constexpr Layout layout_of(int32_t format) {
  switch (format) {
    case kQ8_0: return {32, 34, 32, RecordQ8_0::bytes};
    case kQ5_0: return {32, 22, 32, RecordQ5_0::bytes};
    case kQ4_0: return {32, 18, 32, RecordQ4_0::bytes};
    case kQ4_K: return {256, 144, 64, RecordQ4_K::bytes};
    case kQ5_K: return {256, 176, 64, RecordQ5_K::bytes};
    case kQ6_K: return {256, 210, 32, RecordQ6_K::bytes};
    default: return {0, 0, 0, 0};
  }
}

static constexpr int64_t scale_plane_bytes(int64_t scale_bytes, int64_t blocks) {
  return (scale_bytes * blocks + 63) / 64 * 64;
}
static constexpr int64_t group_bytes(Layout l, int64_t blocks) {
  return scale_plane_bytes(l.scale_bytes, blocks) + l.record_bytes * blocks;
}

// What is kept of an activation block beside its int8 codes. Sums are negated: a format whose codes
// are stored with an offset starts its integer sum at offset * -sum.
struct Block32 {
  float d;
  int32_t negative_sum;
};
struct Block256 {
  float d;
  int16_t sum32[8];            // of each 32 codes; magnitude at most 4064
  int32_t negative_sum16[16];  // of each 16 codes
};

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
struct LinearTask {
  int32_t format;
  const uint8_t* packed;
  int64_t outputs, columns;
  const int8_t* codes;
  const void* blocks;
  int64_t rows;
  float* y;
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
