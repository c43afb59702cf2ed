// Products of which a group makes kTall rows by kGroup columns, a column a thread. A chunk of the kTall rows is
// read once into memory that the group shares; an element of the other side is read, and widened or
// dequantised, once for all of them.
#pragma once
#include "float_weights.h"
#include "quant_blocks.h"

namespace vox {
namespace VOX_ISA {

struct TallSums {
  float v[kTall];
};

// One weight in float32, as term `row` of the sum `column`: W by its rows, or as it is.
template <class F>
struct FloatRows {
  typedef VOX_DEVICE const typename F::Stored* Memory;
  CANON float at(Memory w, int64_t row, int64_t column, TallArgs args) {
    return F::widened(w[column * args.terms + row]);
  }
};
template <class F>
struct FloatColumns {
  typedef VOX_DEVICE const typename F::Stored* Memory;
  CANON float at(Memory w, int64_t row, int64_t column, TallArgs args) {
    return F::widened(w[row * args.columns + column]);
  }
};
template <class F>
struct BlockColumns32 {
  typedef BlockBytes Memory;
  CANON float at(Memory w, int64_t row, int64_t column, TallArgs args) {
    return block_weight32<F>(w + (row * (args.columns / 32) + column / 32) * F::bytes, (int32_t)(column % 32));
  }
};
template <class F>
struct BlockColumns256 {
  typedef BlockBytes Memory;
  CANON float at(Memory w, int64_t row, int64_t column, TallArgs args) {
    return block_weight256<F>(w + (row * (args.columns / 256) + column / 256) * F::bytes, (int32_t)(column % 256));
  }
};

// The sums of a column after one more chunk: `count` terms of each row in `left` [term][kTall], by the
// terms [row, row + count) of `right`.
template <class Right>
CANON TallSums tall_chunk_folded(bool is_first, TallSums total, VOX_SHARED_POINTER const float* left,
                                 typename Right::Memory right, int64_t row, int64_t column, TallArgs args,
                                 int32_t count) {
  TallSums p;
  for (int t = 0; t < kTall; ++t) p.v[t] = 0.0f;
  for (int32_t n = 0; n < count; ++n) {
    const float w = Right::at(right, row + n, column, args);
    for (int t = 0; t < kTall; ++t) p.v[t] = f_fma(left[n * kTall + t], w, p.v[t]);
  }
  for (int t = 0; t < kTall; ++t) total.v[t] = chunk_folded(is_first, total.v[t], p.v[t]);
  return total;
}

}  // namespace VOX_ISA
}  // namespace vox

// The terms [first, end) of every sum, behind those that `out` has when first is not 0.
#define VOX_TALL(name, Element, Right)                                                                               \
  VOX_KERNEL(name)(VOX_IN(float, x, 0), VOX_IN(Element, weight, 1), VOX_OUT(float, out, 2),                          \
                   VOX_OUT(int32_t, faults, 3), VOX_ARGS(TallArgs, 4)) {                                             \
    VOX_SHARED float left[kTallChunk];                                                                               \
    const int64_t column = VOX_THREAD_X, first = VOX_GROUP_Y * kTall;                                                \
    TallSums total;                                                                                                  \
    for (int t = 0; t < kTall; ++t) {                                                                                \
      const bool goes_on = args.first > 0 && column < args.columns && first + t < args.rows;                         \
      total.v[t] = goes_on ? out[(first + t) * args.columns + column] : 0.0f;                                        \
    }                                                                                                                \
    for (int32_t n = args.first; n < args.end; n += (int32_t)kChunk) {                                               \
      const int32_t count = args.end - n < (int32_t)kChunk ? args.end - n : (int32_t)kChunk;                         \
      VOX_BARRIER();                                                                                                 \
      for (int t = 0; t < kTall; ++t) {                                                                              \
        const bool is_there = first + t < args.rows && VOX_LOCAL < count;                                            \
        left[VOX_LOCAL * kTall + t] = is_there ? x[(first + t) * args.terms + n + VOX_LOCAL] : 0.0f;                 \
      }                                                                                                              \
      VOX_BARRIER();                                                                                                 \
      if (column < args.columns)                                                                                     \
        total = tall_chunk_folded<Right>(n == 0, total, left, weight, n - args.first, column, args, count);          \
    }                                                                                                                \
    if (column >= args.columns) return;                                                                              \
    for (int t = 0; t < kTall; ++t) {                                                                                \
      if (first + t >= args.rows) continue;                                                                          \
      out[(first + t) * args.columns + column] = total.v[t];                                                         \
      VOX_WATCH(total.v[t], first + t);                                                                              \
    }                                                                                                                \
  }
