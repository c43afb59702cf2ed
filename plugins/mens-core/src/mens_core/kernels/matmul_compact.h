// Products with a bf16 matrix of twelve bits a weight: the terms, chains and folds of matmul_float.h.
#pragma once
#include "compact.h"
#include "definitions.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

CANON VF eight_terms(const CompactPanel& panel, int64_t block, const float* x, VF sum) {
  VF w[4];
  half_block<0>(panel.block(block), panel.table, w);
  for (int k = 0; k < 4; ++k) sum = f_fma(f_splat(x[k]), w[k], sum);
  half_block<1>(panel.block(block), panel.table, w);
  for (int k = 0; k < 4; ++k) sum = f_fma(f_splat(x[4 + k]), w[k], sum);
  return sum;
}

// Eight terms of C chains side by side, chain c's in chunk c, from `block` of the first one on. Side by side by
// themselves: the terms of a chain follow one another here, and no chain waits for another.
template <int C>
CANON void compact_terms(const CompactPanel& panel, int64_t block, const float* x, VF (&sums)[C]) {
  for (int c = 0; c < C; ++c)
    sums[c] = eight_terms(panel, block + c * compact::kChunkBlocks, x + c * kChunk, sums[c]);
}

// The same where a block has kept columns; rare, and not to be found among the others' instructions.
template <int C>
static __attribute__((noinline)) void compact_terms_with_kept(const CompactPanel& panel, int64_t block, const float* x,
                                                              VF (&sums)[C]) {
  for (int c = 0; c < C; ++c) {
    const int64_t number = block + c * compact::kChunkBlocks;
    if (!panel.has_kept(number)) {
      sums[c] = eight_terms(panel, number, x + c * kChunk, sums[c]);
      continue;
    }
    float w[compact::kColumns * kLanes];
    panel.read_block(number, w);
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

// Four terms of R rows by P panels, from column `k` on.
template <int HALF, int R, int P>
CANON void compact_tile_terms(const CompactPanel* panels, int64_t number, const RowsLeft& x, int64_t k, VF (&acc)[R][P]) {
  if (kTilePanels > 1) {  // registers enough for the columns of all panels: a term of x is read once
    VF w[P][4];
    for (int p = 0; p < P; ++p) half_block<HALF>(panels[p].block(number), panels[p].table, w[p]);
    for (int i = 0; i < 4; ++i)
      for (int r = 0; r < R; ++r) {
        const VF left = f_splat(x.at(r, k + i));
        for (int p = 0; p < P; ++p) acc[r][p] = f_fma(left, w[p][i], acc[r][p]);
      }
    return;
  }
  for (int p = 0; p < P; ++p) {
    VF w[4];
    half_block<HALF>(panels[p].block(number), panels[p].table, w);
    for (int i = 0; i < 4; ++i)
      for (int r = 0; r < R; ++r) acc[r][p] = f_fma(f_splat(x.at(r, k + i)), w[i], acc[r][p]);
  }
}

// R rows by P panels of one chunk: columns [first, end). What lies `ahead` bytes from them is asked for.
template <int R, int P>
static inline void compact_tile(const CompactPanel* panels, const RowsLeft& x, int64_t first, int64_t end,
                                int64_t ahead, float* out, int64_t out_stride, Finish finish) {
  VF acc[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) acc[r][p] = f_splat(0.0f);
  for (int64_t k = first; k < end; k += compact::kColumns) {
    const int64_t number = k / compact::kColumns, columns = end - k < compact::kColumns ? end - k : compact::kColumns;
    bool is_plain = columns == compact::kColumns;
    for (int p = 0; p < P; ++p) {
      const uint8_t* next = panels[p].block(number) + ahead;
      for (int64_t line = 0; line < compact::kBlockBytes; line += compact::kLine) prefetch_line(next + line);
      is_plain = is_plain && !panels[p].has_kept(number);
    }
    if (is_plain) {
      compact_tile_terms<0>(panels, number, x, k, acc);
      compact_tile_terms<1>(panels, number, x, k + 4, acc);
      continue;
    }
    for (int p = 0; p < P; ++p) {
      float w[compact::kColumns * kLanes];
      panels[p].read_block(number, w);
      for (int64_t i = 0; i < columns; ++i)
        for (int r = 0; r < R; ++r) acc[r][p] = f_fma(f_splat(x.at(r, k + i)), f_load(w + i * kLanes), acc[r][p]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) {
      float* to = out + r * out_stride + p * kLanes;
      f_store(to, finish == Finish::store ? acc[r][p] : f_add(f_load(to), acc[r][p]));
    }
}

// The same for a number of rows known only now, at most kTileRows.
template <int P>
static void compact_tile_rows(int64_t rows, const CompactPanel* panels, const RowsLeft& x, int64_t first, int64_t end,
                              int64_t ahead, float* out, int64_t out_stride, Finish finish) {
  switch (rows) {
    case 1: return compact_tile<1, P>(panels, x, first, end, ahead, out, out_stride, finish);
    case 2: return compact_tile<2, P>(panels, x, first, end, ahead, out, out_stride, finish);
    case 3: return compact_tile<3, P>(panels, x, first, end, ahead, out, out_stride, finish);
    case 4: return compact_tile<4, P>(panels, x, first, end, ahead, out, out_stride, finish);
    case 5: return compact_tile<5, P>(panels, x, first, end, ahead, out, out_stride, finish);
    default: return compact_tile<6, P>(panels, x, first, end, ahead, out, out_stride, finish);
  }
}

// Rows whose sums for two panels fit the registers beside a few columns of weights.
constexpr int64_t kCompactPairRows = kTilePanels > 1 ? kTileRows : 3;
// Up to so many rows a chunk is unpacked anew for each few of them, from the first cache; more share it as floats.
constexpr int64_t kCompactRows = (kTilePanels > 1 ? 4 : 2) * kTileRows;

// Some rows by all panels of a part, two panels after another: what is read next is asked for meanwhile.
static void compact_few_rows(const LinearTask& task, const CompactMatrix& weight, int64_t panel, int64_t panels,
                             int64_t first, int64_t rows, float* tile_out) {
  constexpr int64_t kWidth = kGroupPanels * kLanes;
  const int64_t inputs = task.weight.inputs;
  const int64_t tiles = (rows + kTileRows - 1) / kTileRows, of_tile = (rows + tiles - 1) / tiles;
  for (int64_t p = 0; p < panels; p += 2) {
    const bool is_pair = p + 1 < panels;
    const CompactPanel pair[2] = {weight.panel(panel + p), weight.panel(panel + (is_pair ? p + 1 : p))};
    for (int64_t k = 0; k < inputs; k += kChunk) {
      const int64_t end = k + kChunk < inputs ? k + kChunk : inputs;
      const Finish finish = k == 0 ? Finish::store : Finish::fold;
      // Two chunks further on or, where the panels end before that, in the two that come after them.
      int64_t ahead = 2 * compact::kChunkBlocks * compact::kBlockBytes;
      if (k + 2 * kChunk >= inputs) ahead += weight.stride + weight.header;
      for (int64_t r = 0; r < rows; r += of_tile) {
        const int64_t count = rows - r < of_tile ? rows - r : of_tile;
        const RowsLeft x{task.x + (first + r) * inputs, inputs};
        float* out = tile_out + r * kWidth + p * kLanes;
        if (is_pair && count <= kCompactPairRows) {
          compact_tile_rows<2>(count, pair, x, k, end, ahead, out, kWidth, finish);
          continue;
        }
        compact_tile_rows<1>(count, pair, x, k, end, ahead, out, kWidth, finish);
        if (is_pair) compact_tile_rows<1>(count, pair + 1, x, k, end, ahead, out + kLanes, kWidth, finish);
      }
    }
  }
}

// As the one for a side of tile.h.
static void linear_group(const LinearTask& task, const CompactMatrix& weight, int64_t panel, int64_t panels,
                         int64_t first, int64_t last, float* tile_out, float* widened) {
  constexpr int64_t kWidth = kGroupPanels * kLanes;
  const int64_t inputs = task.weight.inputs;
  if (last - first == 1) {
    for (int64_t p = 0; p < panels; ++p)
      compact_one_row(weight.panel(panel + p), task.x + first * inputs, inputs, tile_out + p * kLanes, widened);
    return;
  }
  if (last - first <= kCompactRows)
    return compact_few_rows(task, weight, panel, panels, first, last - first, tile_out);
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
