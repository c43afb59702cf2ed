// linear for many rows: the bits of float_weights.h and quantised.h, a weight read once for kTall rows.
#pragma once
#include "tall.h"

VOX_TALL(vox_linear_tall_f32, float, FloatRows<F32>)
VOX_TALL(vox_linear_tall_f16, uint16_t, FloatRows<F16>)
VOX_TALL(vox_linear_tall_bf16, uint16_t, FloatRows<Bf16>)

namespace vox {
namespace VOX_ISA {

struct TallDots {
  int32_t v[kTall];
};

// The integer dots of `count` codes of a block, from code `first` on, with those of each row in `left`
// [column][kTall], and the sums of the latter.
template <class F>
CANON TallDots tall_dots(BlockBytes w, VOX_SHARED_POINTER const int8_t* left, int32_t first, int32_t count) {
  TallDots dots;
  for (int t = 0; t < kTall; ++t) dots.v[t] = 0;
  for (int32_t i = first; i < first + count; ++i) {
    const int32_t code = F::code(w, i);
    for (int t = 0; t < kTall; ++t) dots.v[t] += code * left[i * kTall + t];
  }
  return dots;
}
CANON TallDots tall_code_sums(VOX_SHARED_POINTER const int8_t* left, int32_t first, int32_t count) {
  TallDots sums;
  for (int t = 0; t < kTall; ++t) sums.v[t] = 0;
  for (int32_t i = first; i < first + count; ++i)
    for (int t = 0; t < kTall; ++t) sums.v[t] += left[i * kTall + t];
  return sums;
}

// Chunks of a row of weights: four blocks of 32, or one super-block. `scales` [block][kTall].
template <class F>
struct TallBlocks32 {
  CANON TallSums chunk(BlockBytes w, VOX_SHARED_POINTER const int8_t* left, VOX_SHARED_POINTER const float* scales,
                       int32_t blocks) {
    TallSums p;
    for (int t = 0; t < kTall; ++t) p.v[t] = 0.0f;
    for (int32_t b = 0; b < blocks; ++b, w += F::bytes) {
      const TallDots dots = tall_dots<F>(w, left + b * 32 * kTall, 0, 32);
      for (int t = 0; t < kTall; ++t) p.v[t] = block_chained(p.v[t], F::d(w), scales[b * kTall + t], dots.v[t]);
    }
    return p;
  }
};
template <class F>
struct TallBlocks256 {
  CANON TallSums chunk(BlockBytes w, VOX_SHARED_POINTER const int8_t* left, VOX_SHARED_POINTER const float* scales,
                       int32_t) {
    TallDots u, v;
    for (int t = 0; t < kTall; ++t) u.v[t] = v.v[t] = 0;
    for (int32_t j = 0; j < 256 / F::sub; ++j) {
      const TallDots dots = tall_dots<F>(w, left, j * F::sub, F::sub);
      for (int t = 0; t < kTall; ++t) u.v[t] += F::scale(w, j) * dots.v[t];
      if (!F::has_minima) continue;
      const TallDots sums = tall_code_sums(left, j * F::sub, F::sub);
      for (int t = 0; t < kTall; ++t) v.v[t] += F::minimum(w, j) * sums.v[t];
    }
    TallSums p;
    for (int t = 0; t < kTall; ++t) {
      p.v[t] = block_chained(0.0f, F::d(w), scales[t], u.v[t]);
      if (F::has_minima) p.v[t] = less_minima(p.v[t], F::dmin(w), scales[t], v.v[t]);
    }
    return p;
  }
};

}  // namespace VOX_ISA
}  // namespace vox

// args.terms columns of the weight, args.columns outputs; `size` columns share a scale, `step` are a chunk.
#define VOX_TALL_QUANTISED(suffix, F, size, step)                                                                    \
  VOX_KERNEL(vox_linear_tall_##suffix)(VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1),                           \
                                       VOX_IN(uint8_t, weight, 2), VOX_OUT(float, out, 3),                           \
                                       VOX_OUT(int32_t, faults, 4), VOX_ARGS(TallArgs, 5)) {                         \
    VOX_SHARED int8_t left[kTallCodes];                                                                              \
    VOX_SHARED float left_scales[kTallScales];                                                                       \
    const int64_t column = VOX_THREAD_X, first = VOX_GROUP_Y * kTall, blocks = args.terms / size;                    \
    TallSums total;                                                                                                  \
    for (int t = 0; t < kTall; ++t) total.v[t] = 0.0f;                                                               \
    for (int32_t k = 0; k < args.terms; k += step) {                                                                 \
      const int32_t count = args.terms - k < step ? args.terms - k : step;                                           \
      VOX_BARRIER();                                                                                                 \
      for (int32_t i = VOX_LOCAL; i < count; i += kGroup)                                                            \
        for (int t = 0; t < kTall; ++t)                                                                              \
          left[i * kTall + t] = first + t < args.rows ? codes[(first + t) * args.terms + k + i] : (int8_t)0;         \
      if (VOX_LOCAL < count / size * kTall) {                                                                        \
        const int64_t row = first + VOX_LOCAL % kTall;                                                               \
        left_scales[VOX_LOCAL] = row < args.rows ? scales[row * blocks + k / size + VOX_LOCAL / kTall] : 0.0f;       \
      }                                                                                                              \
      VOX_BARRIER();                                                                                                 \
      if (column >= args.columns) continue;                                                                          \
      BlockBytes block = weight + (column * blocks + k / size) * F::bytes;                                           \
      const TallSums p = TallBlocks##size<F>::chunk(block, left, left_scales, count / size);                         \
      for (int t = 0; t < kTall; ++t) total.v[t] = chunk_folded(k == 0, total.v[t], p.v[t]);                         \
    }                                                                                                                \
    if (column >= args.columns) return;                                                                              \
    for (int t = 0; t < kTall; ++t) {                                                                                \
      if (first + t >= args.rows) continue;                                                                          \
      out[(first + t) * args.columns + column] = total.v[t];                                                         \
      VOX_WATCH(total.v[t], first + t);                                                                              \
    }                                                                                                                \
  }
VOX_TALL_QUANTISED(q8_0, FileQ8_0, 32, 128)
VOX_TALL_QUANTISED(q5_0, FileQ5_0, 32, 128)
VOX_TALL_QUANTISED(q4_0, FileQ4_0, 32, 128)
VOX_TALL_QUANTISED(q4_k, FileQ4_K, 256, 256)
VOX_TALL_QUANTISED(q5_k, FileQ5_K, 256, 256)
VOX_TALL_QUANTISED(q6_k, FileQ6_K, 256, 256)
#undef VOX_TALL_QUANTISED
