// y = x W^T for quantised weights: exact integer dots inside a block, one float chain over blocks.
//
// The text is the same for every instruction set (quant_simd.h) and for one row or twelve: a tile
// is R rows of x against one group of 16 rows of W. Integer sums may be taken in any order; the
// float operations are those of docs/numerics.md, one lane per output, so neither R nor the
// lane width nor the thread that runs the tile can change a bit.
#pragma once
#include "definitions.h"
#include "quant_formats.h"
#include "quant_simd.h"

namespace vox {
namespace VOX_ISA {

// Bytes ahead of use at which the stream is asked for, as measured for every format (docs/log.md): memory answers
// after so many nanoseconds, and the more rows share a reading, the more other work lies in a byte of it.
static constexpr int ahead_of(int rows, int block) { return rows < (block == 32 ? 4 : 2) ? 1024 : 6144; }

// --- codes ---------------------------------------------------------------------------------
// Blocks of 32: `codes<G>(record, lower)` gives columns 4 G .. 4 G + 3 for the 16 rows of a group, larger
// than the weight's code by 2^log2_offset (-1: not at all). `lower` is the record's lower half, where it has one.

struct CodesQ8_0 {
  using Record = quant::RecordQ8_0;
  static constexpr int log2_offset = kFullOffsetLog2;
  template <int G>
  CANON FullBytes codes(const uint8_t* record, const uint8_t*) {
    return full_bytes(load_bytes(record + G * quant::kKGroupBytes));
  }
  CANON VI dot(VI sum, const FullBytes& w, int32_t a) { return dot_full(sum, w, a); }
};

// Nibbles as in the file: byte i of a block holds columns i (low) and i + 16 (high).
template <int G>
CANON Bytes nibbles32(const uint8_t* codes) {
  const Bytes pair = load_bytes(codes + (G & 3) * quant::kKGroupBytes);
  return G < 4 ? low_nibbles(pair) : high_nibbles(pair);
}
struct CodesQ8_0Halves {
  using Record = quant::RecordQ8_0Half;
  static constexpr int log2_offset = kFullOffsetLog2;
  template <int G>
  CANON FullBytes codes(const uint8_t* record, const uint8_t* lower) {
    return full_bytes(insert_bits<G < 4 ? 4 : 0, 0xF0>(nibbles32<G>(lower), load_bytes(record + (G & 3) * quant::kKGroupBytes)));
  }
  CANON VI dot(VI sum, const FullBytes& w, int32_t a) { return dot_full(sum, w, a); }
};
struct CodesQ4_0 {
  using Record = quant::RecordQ4_0;
  static constexpr int log2_offset = 3;
  template <int G>
  CANON Bytes codes(const uint8_t* record, const uint8_t*) {
    return nibbles32<G>(record);
  }
  CANON VI dot(VI sum, const Bytes& w, int32_t a) { return dot_codes(sum, w, a); }
};
// One byte of the plane holds bit 4 of eight codes: bit G belongs to k-group G.
struct CodesQ5_0 {
  using Record = quant::RecordQ5_0;
  static constexpr int log2_offset = 4;
  template <int G>
  CANON Bytes codes(const uint8_t* record, const uint8_t*) {
    return insert_bits<4 - G, 16>(nibbles32<G>(record + Record::codes), load_bytes(record + Record::high));
  }
  CANON VI dot(VI sum, const Bytes& w, int32_t a) { return dot_codes(sum, w, a); }
};

// Super-blocks of 256: a record is four parts; `codes<J, G>(part)` gives k-group G of sub-block J of a
// part, `column_sub(i, J)` says which sub-block of the columns that is.
struct CodesQ4_K {
  using Record = quant::RecordQ4_K;
  static constexpr int subs = 2, groups = 8;
  static constexpr bool has_min = true;
  static constexpr bool has_offset = false;
  template <int J, int G>
  CANON Bytes codes(const uint8_t* part) {
    const Bytes pair = load_bytes(part + G * quant::kKGroupBytes);
    return J == 0 ? low_nibbles(pair) : high_nibbles(pair);
  }
  CANON int column_sub(int i, int j) { return 2 * i + j; }
  CANON VI scale(const uint8_t* record, int i, int j) { return i_load_u8(record + Record::scales + 16 * (2 * i + j)); }
};
struct CodesQ5_K {
  using Record = quant::RecordQ5_K;
  static constexpr int subs = 2, groups = 8;
  static constexpr bool has_min = true;
  static constexpr bool has_offset = false;
  template <int J, int G>
  CANON Bytes codes(const uint8_t* part) {
    return insert_bits<4 - G, 16>(CodesQ4_K::codes<J, G>(part + Record::part_codes),
                                  load_bytes(part + Record::part_high + J * quant::kKGroupBytes));
  }
  CANON int column_sub(int i, int j) { return 2 * i + j; }
  CANON VI scale(const uint8_t* record, int i, int j) { return i_load_u8(record + Record::scales + 16 * (2 * i + j)); }
};
// A part is 16 columns out of each quarter of 128: quarters 0 and 1 are the low nibbles of two runs of
// bytes, 2 and 3 the high nibbles of the same; bits 4 and 5 of all four lie in one byte of the plane.
struct CodesQ6_K {
  using Record = quant::RecordQ6_K;
  static constexpr int subs = 4, groups = 4;
  static constexpr bool has_min = false;
  static constexpr bool has_offset = true;  // 32
  template <int J, int G>
  CANON Bytes codes(const uint8_t* part) {
    const Bytes pair = load_bytes(part + Record::part_codes + ((J & 1) * 4 + G) * quant::kKGroupBytes);
    const Bytes plane = load_bytes(part + Record::part_high + G * quant::kKGroupBytes);
    return insert_bits<4 - 2 * J, 48>(J < 2 ? low_nibbles(pair) : high_nibbles(pair), plane);
  }
  CANON int column_sub(int i, int j) { return i / 2 * 8 + j * 2 + i % 2; }
  CANON VI scale(const uint8_t* record, int i, int j) {
    return i_load_i8(record + Record::parts + i * Record::part_bytes + Record::part_scales + 16 * j);
  }
};

// --- tiles: R rows of x against one group --------------------------------------------------

template <quant::Format FORMAT, class C>
struct OfFormat {
  static constexpr quant::Format format = FORMAT;
  using Codes = C;
};

// Step I of N over `bytes` of the stream: its share of cache lines. Spread out, so that no burst fills
// the core's few line buffers.
template <int AHEAD>
CANON void prefetch_share(const uint8_t* from, int bytes, int i, int n) {
  const int lines = bytes / 64;
  for (int line = lines * i / n; line < lines * (i + 1) / n; ++line) prefetch(from + AHEAD + 64 * line);
}

// R rows of activations: one panel of R < 4 rows, or R / 4 panels of four.
template <class Block, int R>
struct Panels {
  static constexpr int width = R < quant::kPanelRows ? R : quant::kPanelRows;
  static constexpr int count = (R + quant::kPanelRows - 1) / quant::kPanelRows;
  const int8_t* codes[count];
  const Block* blocks[count];

  Panels(const quant::LinearTask& task, int64_t row, int64_t block_count) {
    for (int i = 0; i < count; ++i) {
      codes[i] = task.codes + (row + i * width) * task.columns;
      blocks[i] = static_cast<const Block*>(task.blocks) + (row + i * width) * block_count;
    }
  }
  inline __attribute__((always_inline)) int32_t four(int r, int k_group) const {
    return load_i32(codes[r / width] + (k_group * width + r % width) * 4);
  }
  inline __attribute__((always_inline)) const Block& block(int r) const { return blocks[r / width][r % width]; }
  inline __attribute__((always_inline)) void next() {
    for (int i = 0; i < count; ++i) {
      codes[i] += width * (sizeof(Block) == sizeof(quant::Block32) ? 32 : 256);
      blocks[i] += width;
    }
  }
};

template <int LOG2>
CANON VI start_of_sum(int32_t negative_sum) {
  return LOG2 < 0 ? i_splat(0) : i_shl<LOG2 < 0 ? 0 : LOG2>(i_splat(negative_sum));
}
CANON VF load_scales(const uint8_t* p) { return f_load_f16(reinterpret_cast<const uint16_t*>(p)); }

template <class F, int R>
static void tile32(const uint8_t* group, const uint8_t* lower, int64_t blocks, const quant::LinearTask& task, int64_t row,
                   VF* y) {
  using C = typename F::Codes;
  constexpr quant::Layout layout = quant::layout_of(F::format);
  constexpr int ahead = ahead_of(R, 32);
  Panels<quant::Block32, R> x(task, row, blocks);
  const uint8_t* record = group;
  for (int64_t first = 0; first < blocks; first += quant::kChunkBlocks) {
    const int64_t in_chunk = blocks - first < quant::kChunkBlocks ? blocks - first : quant::kChunkBlocks;
    const uint8_t* scales = record;
    record += quant::chunk_scale_bytes(in_chunk);
    prefetch_share<ahead>(scales, 128, 0, 1);
    VF p[R];
    for (int r = 0; r < R; ++r) p[r] = f_splat(0.0f);
    for (int64_t b = 0; b < in_chunk; ++b, record += layout.record_bytes, lower += layout.lower_bytes, scales += 32, x.next()) {
      VI sum[R];
      for (int r = 0; r < R; ++r) sum[r] = start_of_sum<C::log2_offset>(x.block(r).negative_sum);
      unroll<8>([&](auto g) {
        constexpr int G = decltype(g)::value;
        prefetch_share<ahead>(record, layout.record_bytes, G, 8);
        prefetch_share<ahead>(lower, layout.lower_bytes, G, 8);
        const auto w = C::template codes<G>(record, lower);
        for (int r = 0; r < R; ++r) sum[r] = C::dot(sum[r], w, x.four(r, G));
      });
      const VF d = load_scales(scales);
      for (int r = 0; r < R; ++r) p[r] = block_chained(p[r], d, f_splat(x.block(r).d), sum[r]);
    }
    for (int r = 0; r < R; ++r) y[r] = chunk_folded(first == 0, y[r], p[r]);
  }
}

template <class F, int R>
static void tile256(const uint8_t* group, int64_t blocks, const quant::LinearTask& task, int64_t row, VF* y) {
  using Record = typename F::Record;
  constexpr int ahead = ahead_of(R, 256);
  Panels<quant::Block256, R> x(task, row, blocks);
  const uint8_t* record = group;
  for (int64_t b = 0; b < blocks; ++b, record += Record::bytes, x.next()) {
    prefetch_share<ahead>(record, Record::parts, 0, 1);
    VI u[R];
    for (int r = 0; r < R; ++r) u[r] = i_splat(0);
    for (int i = 0; i < 4; ++i) {
      const uint8_t* part = record + Record::parts + i * Record::part_bytes;
      unroll<F::subs>([&](auto j) {
        constexpr int J = decltype(j)::value;
        const int sub = F::column_sub(i, J);
        VI sum[R];
        for (int r = 0; r < R; ++r) sum[r] = i_splat(F::has_offset ? x.block(r).start16[sub] : 0);
        unroll<F::groups>([&](auto g) {
          constexpr int G = decltype(g)::value;
          prefetch_share<ahead>(part, Record::part_bytes, J * F::groups + G, F::subs * F::groups);
          const Bytes w = F::template codes<J, G>(part);
          for (int r = 0; r < R; ++r) sum[r] = dot_codes(sum[r], w, x.four(r, sub * F::groups + G));
        });
        const VI scale = F::scale(record, i, J);
        for (int r = 0; r < R; ++r) u[r] = i_mul_add(scale, sum[r], u[r]);
      });
    }
    const VF d = load_scales(record + Record::d);
    VF p[R];
    for (int r = 0; r < R; ++r) p[r] = block_chained(f_splat(0.0f), d, f_splat(x.block(r).d), u[r]);
    if constexpr (F::has_min) {
      VI v[R];
      for (int r = 0; r < R; ++r) v[r] = i_splat(0);
      for (int i = 0; i < 4; ++i) {
        const Pairs mins = load_pairs(record + Record::mins + 32 * i);
        for (int r = 0; r < R; ++r) v[r] = dot_pairs(v[r], mins, load_i32(x.block(r).sum32 + 2 * i));
      }
      const VF dmin = load_scales(record + Record::dmin);
      for (int r = 0; r < R; ++r) p[r] = less_minima(p[r], dmin, f_splat(x.block(r).d), v[r]);
    }
    for (int r = 0; r < R; ++r) y[r] = chunk_folded(b == 0, y[r], p[r]);
  }
}

// --- parts ---------------------------------------------------------------------------------

// 0, or 1 + the first of R rows that is not finite. Rows of a tile are looked at together first.
template <int R>
static int64_t fault_of(const VF* y, int64_t row) {
  FiniteWatch all;
  for (int r = 0; r < R; ++r) all.see(y[r]);
  if (all.saw_only_finite()) return 0;
  int64_t fault = 0;
  for (int r = R - 1; r >= 0; --r) {
    FiniteWatch one;
    one.see(y[r]);
    if (!one.saw_only_finite()) fault = 1 + row + r;
  }
  return fault;
}

// Writes a group's outputs, of which the last group may have fewer than sixteen.
template <int R>
static int64_t put_outputs(const VF* y, const quant::LinearTask& task, int64_t output, int64_t row) {
  const int64_t outputs = task.outputs - output < quant::kGroupRows ? task.outputs - output : quant::kGroupRows;
  VF there[R];
  for (int r = 0; r < R; ++r) {
    float* to = task.y + (row + r) * task.outputs + output;
    if (outputs == quant::kGroupRows) {
      f_store(to, y[r]);
      there[r] = y[r];
    } else {
      f_store_some(to, y[r], outputs);
      there[r] = f_load_some(to, outputs);
    }
  }
  return fault_of<R>(there, row);
}

// Keeps the greatest: of equal ones in a lane that of the first group, as groups ascend.
template <int R>
static int64_t keep_highest(const VF* y, const quant::LinearTask& task, int64_t output, int64_t row) {
  const int64_t outputs = task.outputs - output < quant::kGroupRows ? task.outputs - output : quant::kGroupRows;
  const VF group = f_from(i_splat((int32_t)(output / quant::kGroupRows)));
  const int64_t fault = fault_of<R>(y, row);
  for (int r = 0; r < R; ++r) {
    VF mine = y[r];
    if (outputs < quant::kGroupRows) {
      float lanes[kLanes];
      f_store(lanes, mine);
      for (int64_t i = outputs; i < kLanes; ++i) lanes[i] = f_from((int32_t)0xFF800000);  // what is no output
      mine = f_load(lanes);
    }
    float *values = task.highest->values[row + r], *groups = task.highest->groups[row + r];
    const VF best = f_load(values);
    f_store(groups, f_pick_lt(best, mine, group, f_load(groups)));
    f_store(values, f_pick_lt(best, mine, mine, best));
  }
  return fault;
}

// Tiles as tall as the instruction set has registers for, then lower ones for the rest. Tiles of
// four or more rows start at a panel; at most one lower tile ends the rows.
template <class F, int R>
static int64_t group_rows(const uint8_t* group, const uint8_t* lower, const quant::LinearTask& task, int64_t output,
                          int64_t row, int64_t end) {
  constexpr int next = R > quant::kPanelRows ? R - quant::kPanelRows : R - 1;
  constexpr quant::Layout layout = quant::layout_of(F::format);
  const int64_t blocks = task.columns / layout.block;
  int64_t fault = 0;
  for (; row + R <= end; row += R) {
    VF y[R];
    if constexpr (layout.block == 32) tile32<F, R>(group, lower, blocks, task, row, y);
    else tile256<typename F::Codes, R>(group, blocks, task, row, y);
    const int64_t found = task.highest == nullptr ? put_outputs<R>(y, task, output, row) : keep_highest<R>(y, task, output, row);
    if (fault == 0) fault = found;
  }
  if constexpr (next > 0) {
    if (row < end) {
      const int64_t rest = group_rows<F, next>(group, lower, task, output, row, end);
      if (fault == 0) fault = rest;
    }
  }
  return fault;
}

template <class F>
static int64_t linear_parts(const quant::LinearTask& task, int64_t begin, int64_t end) {
  constexpr quant::Layout layout = quant::layout_of(F::format);
  const int64_t groups = quant::groups_of(task.outputs), blocks = task.columns / layout.block;
  const int64_t bytes = quant::group_bytes(layout, blocks);
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t group = part % groups, row = part / groups * quant::kRowsPerPart;
    const int64_t row_end = row + quant::kRowsPerPart < task.rows ? row + quant::kRowsPerPart : task.rows;
    const uint8_t* lower = task.packed + quant::lower_of(layout, task.outputs, blocks, group);
    const int64_t found =
        group_rows<F, kQuantTile>(task.packed + group * bytes, lower, task, group * quant::kGroupRows, row, row_end);
    if (found != 0 && (fault == 0 || found < fault)) fault = found;
  }
  return fault;
}

static int64_t quant_linear_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::LinearTask*>(opaque);
  switch (task.format) {
    case quant::kQ8_0: return linear_parts<OfFormat<quant::kQ8_0, CodesQ8_0>>(task, begin, end);
    case quant::kQ5_0: return linear_parts<OfFormat<quant::kQ5_0, CodesQ5_0>>(task, begin, end);
    case quant::kQ4_0: return linear_parts<OfFormat<quant::kQ4_0, CodesQ4_0>>(task, begin, end);
    case quant::kQ4_K: return linear_parts<OfFormat<quant::kQ4_K, CodesQ4_K>>(task, begin, end);
    case quant::kQ5_K: return linear_parts<OfFormat<quant::kQ5_K, CodesQ5_K>>(task, begin, end);
    case quant::kQ6_K: return linear_parts<OfFormat<quant::kQ6_K, CodesQ6_K>>(task, begin, end);
    case quant::kQ8_0Upper: return linear_parts<OfFormat<quant::kQ8_0Upper, CodesQ8_0Halves>>(task, begin, end);
    default: return 0;
  }
}

}  // namespace VOX_ISA
}  // namespace vox
