// Sixteen columns of sixteen rows of a packed weight, dequantised: what a product over the rows
// of W unpacks, in any format. Lanes are rows, as they are packed; `transpose` turns them.
//
// Float operations are those of "Rows in float32" in docs/numerics.md, in its order.
#pragma once
#include "compact.h"
#include "quant_formats.h"
#include "quant_simd.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

constexpr int64_t kRun = 16;  // columns

template <int N>
CANON VI i_down(VI a) {  // i_sar with a shift by nothing
  if constexpr (N == 0) return a;
  else return i_sar<N>(a);
}
CANON VI load_words(const uint8_t* p) { return i_load(reinterpret_cast<const int32_t*>(p)); }
// Byte T of each row's word: its low (HIGH 0) or high nibble.
template <int T, int HIGH>
CANON VI nibble_of(VI words) {
  return i_and(i_down<8 * T + 4 * HIGH>(words), i_splat(15));
}
// `COUNT` bits from bit BIT of byte T, moved to bit 4.
template <int T, int BIT, int COUNT>
CANON VI high_bits(VI words) {
  return i_shl<4>(i_and(i_down<8 * T + BIT>(words), i_splat((1 << COUNT) - 1)));
}

// --- blocks of 32: run V (0, 1) of a record and its lower half; code of k-group G of the run, byte T
struct RunQ8_0 {
  template <int V, int G, int T>
  CANON VI code(const uint8_t* record, const uint8_t*) {
    const VI words = load_words(record + (4 * V + G) * quant::kKGroupBytes);
    return i_sub(i_and(i_down<8 * T>(words), i_splat(255)), i_splat(128));
  }
};
struct RunQ8_0Halves {
  template <int V, int G, int T>
  CANON VI code(const uint8_t* record, const uint8_t* lower) {
    const VI upper = i_shl<4>(nibble_of<T, V>(load_words(record + G * quant::kKGroupBytes)));
    return i_sub(i_or(upper, nibble_of<T, V>(load_words(lower + G * quant::kKGroupBytes))), i_splat(128));
  }
};
struct RunQ4_0 {
  template <int V, int G, int T>
  CANON VI code(const uint8_t* record, const uint8_t*) {
    return i_sub(nibble_of<T, V>(load_words(record + G * quant::kKGroupBytes)), i_splat(8));
  }
};
struct RunQ5_0 {
  using Record = quant::RecordQ5_0;
  template <int V, int G, int T>
  CANON VI code(const uint8_t* record, const uint8_t*) {
    const VI low = nibble_of<T, V>(load_words(record + Record::codes + G * quant::kKGroupBytes));
    return i_sub(i_or(low, high_bits<T, 4 * V + G, 1>(load_words(record + Record::high))), i_splat(16));
  }
};

template <class F, int V>
static inline void run_of_32(const uint8_t* record, const uint8_t* lower, VF d, float* to) {
  unroll<4>([&](auto g) {
    unroll<4>([&](auto t) {
      constexpr int G = decltype(g)::value, T = decltype(t)::value;
      f_store(to + (4 * G + T) * kLanes, f_mul(i_to_f(F::template code<V, G, T>(record, lower)), d));
    });
  });
}

// --- super-blocks: run j (0 .. 15). Its variant V says which nibbles and bits it is made of. ------
struct RunQ4_K {
  using Record = quant::RecordQ4_K;
  static constexpr bool has_min = true;
  CANON const uint8_t* part(const uint8_t* record, int64_t j) {
    return record + Record::parts + j / 4 * Record::part_bytes;
  }
  CANON int variant(int64_t j) { return (int)(j % 4); }  // nibble * 2 + half of its 32 columns
  CANON VI scale(const uint8_t* record, int64_t j) { return i_load_u8(record + Record::scales + 16 * (j / 2)); }
  template <int V, int G, int T>
  CANON VI code(const uint8_t* part) {
    return nibble_of<T, V / 2>(load_words(part + (V % 2 * 4 + G) * quant::kKGroupBytes));
  }
};
struct RunQ5_K {
  using Record = quant::RecordQ5_K;
  static constexpr bool has_min = true;
  CANON const uint8_t* part(const uint8_t* record, int64_t j) {
    return record + Record::parts + j / 4 * Record::part_bytes;
  }
  CANON int variant(int64_t j) { return (int)(j % 4); }
  CANON VI scale(const uint8_t* record, int64_t j) { return i_load_u8(record + Record::scales + 16 * (j / 2)); }
  template <int V, int G, int T>
  CANON VI code(const uint8_t* part) {
    const VI low = RunQ4_K::code<V, G, T>(part + Record::part_codes);
    const VI plane = load_words(part + Record::part_high + V / 2 * quant::kKGroupBytes);
    return i_or(low, high_bits<T, V % 2 * 4 + G, 1>(plane));
  }
};
struct RunQ6_K {
  using Record = quant::RecordQ6_K;
  static constexpr bool has_min = false;
  CANON const uint8_t* part(const uint8_t* record, int64_t j) {
    return record + Record::parts + (j / 8 * 2 + j % 2) * Record::part_bytes;
  }
  CANON int variant(int64_t j) { return (int)(j % 8 / 2); }  // the quarter of 128 columns
  CANON VI scale(const uint8_t* record, int64_t j) {
    return i_load_i8(part(record, j) + Record::part_scales + 16 * variant(j));
  }
  template <int V, int G, int T>
  CANON VI code(const uint8_t* part) {
    const VI low = nibble_of<T, V / 2>(load_words(part + Record::part_codes + (V % 2 * 4 + G) * quant::kKGroupBytes));
    const VI plane = load_words(part + Record::part_high + G * quant::kKGroupBytes);
    return i_sub(i_or(low, high_bits<T, 2 * V, 2>(plane)), i_splat(32));
  }
};

template <class F, int V>
static inline void run_of_256(const uint8_t* part, VF scale, VF minimum, float* to) {
  unroll<4>([&](auto g) {
    unroll<4>([&](auto t) {
      constexpr int G = decltype(g)::value, T = decltype(t)::value;
      VF w = f_mul(scale, i_to_f(F::template code<V, G, T>(part)));
      if constexpr (F::has_min) w = f_sub(w, minimum);
      f_store(to + (4 * G + T) * kLanes, w);
    });
  });
}

CANON VF half_scales(const uint8_t* p) { return f_load_f16(reinterpret_cast<const uint16_t*>(p)); }

template <class F>
static void run_32(const uint8_t* group, const uint8_t* lower, quant::Layout layout, int64_t blocks, int64_t run,
                   float* to) {
  const quant::Place place = quant::place_of(layout, blocks, run / 2);
  lower += run / 2 * layout.lower_bytes;
  const VF d = half_scales(group + place.scales);
  if (run % 2 == 0) run_of_32<F, 0>(group + place.record, lower, d, to);
  else run_of_32<F, 1>(group + place.record, lower, d, to);
}

template <class F>
static void run_256(const uint8_t* group, const uint8_t*, quant::Layout layout, int64_t, int64_t run, float* to) {
  const uint8_t* record = group + run / 16 * layout.record_bytes;
  const int64_t j = run % 16;
  const VF scale = f_mul(half_scales(record + F::Record::d), i_to_f(F::scale(record, j)));
  VF minimum = f_splat(0.0f);
  if constexpr (F::has_min) {
    // Minima lie in pairs of sub-blocks; a dot with (1, 0) or (0, 1) takes one of them.
    const int64_t sub = j / 2;
    const VI m = dot_pairs(i_splat(0), load_pairs(record + F::Record::mins + 32 * (sub / 2)), sub % 2 == 0 ? 1 : 1 << 16);
    minimum = f_mul(half_scales(record + F::Record::dmin), i_to_f(m));
  }
  const uint8_t* part = F::part(record, j);
  switch (F::variant(j)) {
    case 0: run_of_256<F, 0>(part, scale, minimum, to); break;
    case 1: run_of_256<F, 1>(part, scale, minimum, to); break;
    case 2: run_of_256<F, 2>(part, scale, minimum, to); break;
    default: run_of_256<F, 3>(part, scale, minimum, to); break;
  }
}

// --- a weight in any format ---------------------------------------------------------------------
template <class F>
struct QuantisedRuns {
  const uint8_t* packed;
  quant::Layout layout;
  int64_t outputs, blocks, bytes;

  QuantisedRuns(const void* from, int32_t format, int64_t rows, int64_t inputs)
      : packed(static_cast<const uint8_t*>(from)), layout(quant::layout_of(format)), outputs(rows),
        blocks(inputs / layout.block),
        bytes(quant::group_bytes(layout, blocks)) {}

  // Rows [16 panel, 16 panel + 16), columns [column, column + 16): [column][row], in `memory` or elsewhere.
  const float* read(int64_t panel, int64_t column, int64_t, float* memory) const {
    F::read(packed + panel * bytes, packed + quant::lower_of(layout, outputs, blocks, panel), layout, blocks,
            column / kRun, memory);
    return memory;
  }
};
template <class F>
struct Of32 {
  CANON void read(const uint8_t* group, const uint8_t* lower, quant::Layout l, int64_t blocks, int64_t run, float* to) {
    run_32<F>(group, lower, l, blocks, run, to);
  }
};
template <class F>
struct Of256 {
  CANON void read(const uint8_t* group, const uint8_t* lower, quant::Layout l, int64_t blocks, int64_t run, float* to) {
    run_256<F>(group, lower, l, blocks, run, to);
  }
};

// Side is one of tile.h's; `columns` may end a row early.
template <class Side>
struct FloatRuns {
  Side side;
  const float* read(int64_t panel, int64_t column, int64_t columns, float* memory) const {
    for (int64_t i = 0; i < kRun; ++i)
      f_store(memory + i * kLanes, i < columns ? side.load(column + i, panel) : f_splat(0.0f));
    return memory;
  }
};

struct CompactRuns {
  CompactMatrix matrix;
  const float* read(int64_t panel, int64_t column, int64_t columns, float* memory) const {
    const int64_t count = columns < kRun ? columns : kRun;
    matrix.panel(panel).read(column, column + count, memory);
    for (int64_t i = count; i < kRun; ++i) f_store(memory + i * kLanes, f_splat(0.0f));
    return memory;
  }
};

}  // namespace VOX_ISA
}  // namespace vox
