// Products with a bf16 matrix of twelve bits a weight: the terms, chains and folds of matmul_float.h.
#pragma once
#include "compact.h"
#include "definitions.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

// Eight terms of C chains side by side, chain c's in chunk c, from `block` of the first one on. Side by side by
// themselves: the terms of a chain follow one another here, and no chain waits for another.
template <int C>
CANON void compact_terms(const CompactPanel& panel, int64_t block, const float* x, VF (&sums)[C]) {
  for (int c = 0; c < C; ++c) {
    const uint8_t* from = panel.block(block + c * compact::kChunkBlocks);
    const float* a = x + c * kChunk;
    VF w[4];
    half_block<0>(from, panel.table, w);
    for (int k = 0; k < 4; ++k) sums[c] = f_fma(f_splat(a[k]), w[k], sums[c]);
    half_block<1>(from, panel.table, w);
    for (int k = 0; k < 4; ++k) sums[c] = f_fma(f_splat(a[4 + k]), w[k], sums[c]);
  }
}

// The same where a block has kept columns; rare, and not to be found among the others' instructions.
template <int C>
static __attribute__((noinline)) void compact_terms_with_kept(const CompactPanel& panel, int64_t block, const float* x,
                                                              VF (&sums)[C]) {
  float w[compact::kColumns * kLanes];
  for (int c = 0; c < C; ++c) {
    panel.read_block(block + c * compact::kChunkBlocks, w);
    for (int k = 0; k < compact::kColumns; ++k)
      sums[c] = f_fma(f_splat(x[c * kChunk + k]), f_load(w + k * kLanes), sums[c]);
  }
}

// C whole chunks from column `first` on, folded in order. What follows them is asked for meanwhile (matmul_float.h).
template <int C>
static inline VF compact_chunks(const CompactPanel& panel, const float* x, int64_t first, VF total) {
  const int64_t block = first / compact::kColumns;
  const compact::Chunk* chunk = panel.chunks + first / kChunk;
  VF sums[C];
  unsigned with_kept = 0;
  for (int c = 0; c < C; ++c) {
    sums[c] = f_splat(0.0f);
    with_kept |= chunk[c].blocks;
  }
  for (int64_t b = 0; b < compact::kChunkBlocks; ++b) {
    for (int64_t c = 4; c < 4 + C; ++c)
      for (int64_t line = 0; line < compact::kBlockBytes; line += compact::kLine)
        prefetch_line(panel.block(block + b + c * compact::kChunkBlocks) + line);
    const float* a = x + first + b * compact::kColumns;
    if (with_kept >> b & 1) compact_terms_with_kept<C>(panel, block + b, a, sums);
    else compact_terms<C>(panel, block + b, a, sums);
  }
  for (int c = 0; c < C; ++c) total = chunk_folded(first == 0 && c == 0, total, sums[c]);
  return total;
}

// `memory`: kChunk columns.
static void compact_one_row(const CompactPanel& panel, const float* x, int64_t inputs, float* out, float* memory) {
  VF total = f_splat(0.0f);
  int64_t done = 0;
  for (; done + 4 * kChunk <= inputs; done += 4 * kChunk) total = compact_chunks<4>(panel, x, done, total);
  for (; done + kChunk <= inputs; done += kChunk) total = compact_chunks<1>(panel, x, done, total);
  if (done < inputs) {
    VF acc[1][1] = {{f_splat(0.0f)}};
    panel.read(done, inputs, memory);
    tile_chain<1, 1>(RowsLeft{x + done, 0}, F32Side{memory, kLanes, 0}, 0, 0, inputs - done, acc);
    total = chunk_folded(done == 0, total, acc[0][0]);
  }
  f_store(out, total);
}

// As the one for a side of tile.h: with several rows, a chunk is read once for all of them.
static void linear_group(const LinearTask& task, const CompactMatrix& weight, int64_t panel, int64_t panels,
                         int64_t first, int64_t last, float* tile_out, float* widened) {
  constexpr int64_t kWidth = kGroupPanels * kLanes;
  const int64_t inputs = task.weight.inputs;
  if (last - first == 1) {
    for (int64_t p = 0; p < panels; ++p)
      compact_one_row(weight.panel(panel + p), task.x + first * inputs, inputs, tile_out + p * kLanes, widened);
    return;
  }
  const F32Side side{widened, kLanes, kChunk * kLanes};
  for (int64_t k = 0; k < inputs; k += kChunk) {
    const int64_t end = k + kChunk < inputs ? k + kChunk : inputs;
    for (int64_t p = 0; p < panels; ++p) weight.panel(panel + p).read(k, end, widened + p * kChunk * kLanes);
    for (int64_t r = first; r < last; r += kTileRows)
      tile_rows(last - r < kTileRows ? last - r : kTileRows, panels, RowsLeft{task.x + r * inputs + k, inputs}, side, 0,
                0, end - k, tile_out + (r - first) * kWidth, kWidth, Start::zero, k == 0 ? Finish::store : Finish::fold);
  }
}

// Row `row` as it lay in the file.
static void gather_row(const CompactMatrix& table, int64_t inputs, int64_t row, uint16_t* to) {
  const int64_t lane = row % kPanel;
  const uint8_t* from = table.packed + row / kPanel * table.stride;
  const CompactPanel panel = table.panel(row / kPanel);
  for (int64_t k = 0; k < inputs; ++k) {
    const uint8_t* block = panel.block(k / compact::kColumns);
    const int64_t half = k % compact::kColumns / 4, place = compact::place_of(lane, k % 4);
    const int code = block[2 * compact::kHalfBytes + place] >> (4 * half) & 15;
    to[k] = (uint16_t)(from[code] << 8 | block[half * compact::kHalfBytes + place]);
  }
  const int64_t end = panel.chunks[compact::chunks_of(inputs)].kept;
  for (int64_t i = panel.chunks[0].kept; i < end; ++i) {
    const compact::Kept& kept = panel.kept[i];
    to[kept.column] = (uint16_t)(kept.upper[lane] << 8 | (to[kept.column] & 0xFF));
  }
}

}  // namespace VOX_ISA
}  // namespace vox
