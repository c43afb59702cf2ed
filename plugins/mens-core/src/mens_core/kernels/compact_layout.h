// Where things lie in a bf16 matrix of twelve bits a weight.
//
// A bf16 is two bytes. The lower one, with the exponent's last bit and the mantissa, is kept as it is. Of the
// upper one, sign and seven bits of exponent, sixteen values make up nearly all of a panel: a code of four bits
// looks it up in the panel's table. Where one of a column's sixteen upper bytes is not in the table, the column's
// upper bytes are kept beside the panels. So every pattern of bits comes back as it was.
//
// panels: [header | block of 8 columns]..., then the kept columns of all panels, in order.
// header: table[16], Chunk[chunks + 1], filled up to a cache line.
// block: lower bytes of columns 0 to 3, of columns 4 to 7, then a nibble for each byte of those: low and high.
// Of 64 such bytes, byte 16 q + 8 h + 2 r + c is row 4 q + r of column 2 h + c: interleaved with upper bytes they
// are words of two columns, with no lane crossed.
#pragma once
#include <stdint.h>

#include "sizes.h"

namespace vox {
namespace compact {

constexpr int64_t kRows = 16;    // of a panel
constexpr int64_t kColumns = 8;  // of a block
constexpr int64_t kHalfBytes = 64;
constexpr int64_t kBlockBytes = 3 * kHalfBytes;
constexpr int64_t kChunkBlocks = kChunk / kColumns;
constexpr int64_t kLine = 64;

struct Chunk {
  uint32_t kept;    // the first of its kept columns, counted through the matrix
  uint16_t blocks;  // bit b: block b of the chunk has some
  uint16_t unused;
};
struct Kept {
  uint8_t upper[kRows];
  uint32_t column;
  uint32_t unused[3];
};

static inline int64_t blocks_of(int64_t inputs) { return (inputs + kColumns - 1) / kColumns; }
static inline int64_t chunks_of(int64_t inputs) { return (inputs + kChunk - 1) / kChunk; }
static inline int64_t header_bytes(int64_t inputs) {
  const int64_t used = kRows + (chunks_of(inputs) + 1) * (int64_t)sizeof(Chunk);
  return (used + kLine - 1) / kLine * kLine;
}
static inline int64_t panel_bytes(int64_t inputs) { return header_bytes(inputs) + blocks_of(inputs) * kBlockBytes; }
static inline int64_t panels_of(int64_t outputs) { return (outputs + kRows - 1) / kRows; }

// Byte of a half for row `row` and column `column` of the half.
static inline int64_t place_of(int64_t row, int64_t column) { return row / 4 * 16 + column / 2 * 8 + row % 4 * 2 + column % 2; }

}  // namespace compact
}  // namespace vox
