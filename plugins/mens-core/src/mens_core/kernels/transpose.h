// Exchanging rows and columns; bits move and none changes.
#pragma once
#include "simd.h"

namespace vox {
namespace VOX_ISA {

// to[c][r] = from[r][c] for four rows and four columns.
CANON void transpose_four(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
#if defined(VOX_ISA_NEON)
  const float32x4_t a = vld1q_f32(from), b = vld1q_f32(from + from_stride);
  const float32x4_t c = vld1q_f32(from + 2 * from_stride), d = vld1q_f32(from + 3 * from_stride);
  const float64x2_t ab_even = vreinterpretq_f64_f32(vtrn1q_f32(a, b)), ab_odd = vreinterpretq_f64_f32(vtrn2q_f32(a, b));
  const float64x2_t cd_even = vreinterpretq_f64_f32(vtrn1q_f32(c, d)), cd_odd = vreinterpretq_f64_f32(vtrn2q_f32(c, d));
  vst1q_f32(to, vreinterpretq_f32_f64(vtrn1q_f64(ab_even, cd_even)));
  vst1q_f32(to + to_stride, vreinterpretq_f32_f64(vtrn1q_f64(ab_odd, cd_odd)));
  vst1q_f32(to + 2 * to_stride, vreinterpretq_f32_f64(vtrn2q_f64(ab_even, cd_even)));
  vst1q_f32(to + 3 * to_stride, vreinterpretq_f32_f64(vtrn2q_f64(ab_odd, cd_odd)));
#else
  __m128 a = _mm_loadu_ps(from), b = _mm_loadu_ps(from + from_stride);
  __m128 c = _mm_loadu_ps(from + 2 * from_stride), d = _mm_loadu_ps(from + 3 * from_stride);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps(to, a);
  _mm_storeu_ps(to + to_stride, b);
  _mm_storeu_ps(to + 2 * to_stride, c);
  _mm_storeu_ps(to + 3 * to_stride, d);
#endif
}

// to[c][r] = from[r][c] for any number of rows and columns.
static void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                      int64_t to_stride) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    int64_t c = 0;
    for (; c + 4 <= columns; c += 4)
      transpose_four(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
    for (; c < columns; ++c)
      for (int64_t i = r; i < r + 4; ++i) to[c * to_stride + i] = from[i * from_stride + c];
  }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) to[c * to_stride + r] = from[r * from_stride + c];
}

}  // namespace VOX_ISA
}  // namespace vox
