// Products that gradients are made of: dy W for every weight format, and a^T b of each example's rows.
//
// A group makes kTall rows by kGroup columns, a column a thread. A chunk of the kTall rows is read once into
// memory that the group shares; of the other side, neighbouring threads read neighbouring columns.
#pragma once
#include "float_weights.h"
#include "quant_blocks.h"

namespace vox {
namespace VOX_ISA {

struct TallSums {
  float v[kTall];
};

// One weight [row][column] in float32, for rows of `columns`.
template <class F>
struct FloatColumns {
  typedef VOX_DEVICE const typename F::Stored* Memory;
  CANON float at(Memory w, int64_t row, int64_t column, int64_t columns) {
    return F::widened(w[row * columns + column]);
  }
};
template <class F>
struct BlockColumns32 {
  typedef BlockBytes Memory;
  CANON float at(Memory w, int64_t row, int64_t column, int64_t columns) {
    return block_weight32<F>(w + (row * (columns / 32) + column / 32) * F::bytes, (int32_t)(column % 32));
  }
};
template <class F>
struct BlockColumns256 {
  typedef BlockBytes Memory;
  CANON float at(Memory w, int64_t row, int64_t column, int64_t columns) {
    return block_weight256<F>(w + (row * (columns / 256) + column / 256) * F::bytes, (int32_t)(column % 256));
  }
};

// The sums of a column after one more chunk: `count` terms of each row in `left` [term][kTall], by the
// rows [row, row + count) of `right`.
template <class Right>
CANON TallSums tall_chunk_folded(bool is_first, TallSums total, VOX_SHARED_POINTER const float* left,
                                 typename Right::Memory right, int64_t row, int64_t column, int64_t columns,
                                 int32_t count) {
  TallSums p;
  for (int t = 0; t < kTall; ++t) p.v[t] = 0.0f;
  for (int32_t n = 0; n < count; ++n) {
    const float w = Right::at(right, row + n, column, columns);
    for (int t = 0; t < kTall; ++t) p.v[t] = f_fma(left[n * kTall + t], w, p.v[t]);
  }
  for (int t = 0; t < kTall; ++t) total.v[t] = chunk_folded(is_first, total.v[t], p.v[t]);
  return total;
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_LINEAR_BACKWARD(suffix, Element, Right)                                                                  \
  VOX_KERNEL(vox_linear_backward_##suffix)(VOX_IN(float, dy, 0), VOX_IN(Element, weight, 1), VOX_OUT(float, out, 2), \
                                           VOX_OUT(int32_t, faults, 3), VOX_ARGS(LinearBackwardArgs, 4)) {           \
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
        left[VOX_LOCAL * kTall + t] = is_there ? dy[(first + t) * args.outputs + n + VOX_LOCAL] : 0.0f;              \
      }                                                                                                              \
      VOX_BARRIER();                                                                                                 \
      if (column < args.columns)                                                                                     \
        total = tall_chunk_folded<Right>(n == 0, total, left, weight, n - args.first, column, args.columns, count);  \
    }                                                                                                                \
    if (column >= args.columns) return;                                                                              \
    for (int t = 0; t < kTall; ++t) {                                                                                \
      if (first + t >= args.rows) continue;                                                                          \
      out[(first + t) * args.columns + column] = total.v[t];                                                         \
      VOX_WATCH(total.v[t], first + t);                                                                              \
    }                                                                                                                \
  }
VOX_LINEAR_BACKWARD(f32, float, FloatColumns<F32>)
VOX_LINEAR_BACKWARD(f16, uint16_t, FloatColumns<F16>)
VOX_LINEAR_BACKWARD(bf16, uint16_t, FloatColumns<Bf16>)
VOX_LINEAR_BACKWARD(q8_0, uint8_t, BlockColumns32<FileQ8_0>)
VOX_LINEAR_BACKWARD(q5_0, uint8_t, BlockColumns32<FileQ5_0>)
VOX_LINEAR_BACKWARD(q4_0, uint8_t, BlockColumns32<FileQ4_0>)
VOX_LINEAR_BACKWARD(q4_k, uint8_t, BlockColumns256<FileQ4_K>)
VOX_LINEAR_BACKWARD(q5_k, uint8_t, BlockColumns256<FileQ5_K>)
VOX_LINEAR_BACKWARD(q6_k, uint8_t, BlockColumns256<FileQ6_K>)
#undef VOX_LINEAR_BACKWARD

// Example e owns the rows starts[e] to starts[e + 1] of both sides; chunks are counted from its first.
VOX_KERNEL(vox_example_products)(VOX_IN(float, tall, 0), VOX_IN(float, wide, 1), VOX_IN(int32_t, starts, 2),
                                 VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(ProductsArgs, 5)) {
  VOX_SHARED float left[kTallChunk];
  const int64_t example = VOX_GROUP_Y / args.tiles, first = VOX_GROUP_Y % args.tiles * kTall, column = VOX_THREAD_X;
  const int32_t begin = starts[example], end = starts[example + 1];
  TallSums total;
  for (int t = 0; t < kTall; ++t) total.v[t] = 0.0f;
  for (int32_t r = begin; r < end; r += (int32_t)kChunk) {
    const int32_t count = end - r < (int32_t)kChunk ? end - r : (int32_t)kChunk;
    VOX_BARRIER();
    for (int32_t i = VOX_LOCAL; i < kTallChunk; i += kGroup) {
      const int64_t n = i / kTall, t = first + i % kTall;
      left[i] = n < count && t < args.tall ? tall[(r + n) * args.tall + t] : 0.0f;
    }
    VOX_BARRIER();
    if (column < args.wide)
      total = tall_chunk_folded<FloatColumns<F32> >(r == begin, total, left, wide, r, column, args.wide, count);
  }
  if (column >= args.wide) return;
  VOX_DEVICE float* made = out + example * args.stride;
  for (int t = 0; t < kTall; ++t) {
    if (first + t >= args.tall) continue;
    made[args.is_wide_first != 0 ? column * args.tall + first + t : (first + t) * args.wide + column] = total.v[t];
    VOX_WATCH(total.v[t], example);
  }
}
