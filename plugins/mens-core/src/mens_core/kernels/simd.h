// Sixteen lanes of float or int32 under the names of canon.h: one kernel text for every width.
//
// VF and VI are one register (AVX-512), two (AVX2) or four (NEON). Only elementwise operations
// exist, and the greatest of sixteen, where it may be either zero and anything if there is a NaN: no horizontal sum, which
// would have an order of its own.
#pragma once
#include <stdint.h>

#include "canon.h"

#if defined(VOX_ISA_AVX2) || defined(VOX_ISA_AVX512)
#include <immintrin.h>
#elif defined(VOX_ISA_NEON) || defined(VOX_ISA_NEON_DOT)
#include <arm_neon.h>
#else
#error "simd.h: define VOX_ISA_AVX2, VOX_ISA_AVX512, VOX_ISA_NEON or VOX_ISA_NEON_DOT"
#endif

namespace vox {
namespace VOX_ISA {

constexpr int kLanes = 16;

#if defined(VOX_ISA_AVX512)

// A tile of R rows by P panels of 16 columns holds R * P accumulators of the 32 registers.
constexpr int kTileRows = 6;
constexpr int kTilePanels = 4;

struct VF {
  __m512 v;
};
struct VI {
  __m512i v;
};
CANON VF f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
CANON void f_store(float* p, VF a) { _mm512_storeu_ps(p, a.v); }
CANON VI i_load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
CANON void i_store(int32_t* p, VI a) { _mm512_storeu_si512(p, a.v); }
CANON VF f_splat(float a) { return {_mm512_set1_ps(a)}; }
CANON VI i_splat(int32_t a) { return {_mm512_set1_epi32(a)}; }
CANON VF f_add(VF a, VF b) { return {_mm512_add_ps(a.v, b.v)}; }
CANON VF f_sub(VF a, VF b) { return {_mm512_sub_ps(a.v, b.v)}; }
CANON VF f_mul(VF a, VF b) { return {_mm512_mul_ps(a.v, b.v)}; }
CANON VF f_div(VF a, VF b) { return {_mm512_div_ps(a.v, b.v)}; }
CANON VF f_sqrt(VF a) { return {_mm512_sqrt_ps(a.v)}; }
CANON VF f_fma(VF a, VF b, VF c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
CANON VF f_pick_lt(VF a, VF b, VF yes, VF no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
CANON VI f_bits(VF a) { return {_mm512_castps_si512(a.v)}; }
CANON VF f_from(VI a) { return {_mm512_castsi512_ps(a.v)}; }
CANON VI i_add(VI a, VI b) { return {_mm512_add_epi32(a.v, b.v)}; }
CANON VI i_sub(VI a, VI b) { return {_mm512_sub_epi32(a.v, b.v)}; }
CANON VI i_xor(VI a, VI b) { return {_mm512_xor_si512(a.v, b.v)}; }
CANON VI i_and(VI a, VI b) { return {_mm512_and_si512(a.v, b.v)}; }
CANON VI i_or(VI a, VI b) { return {_mm512_or_si512(a.v, b.v)}; }
CANON VI i_max(VI a, VI b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int N>
CANON VI i_shl(VI a) {
  return {_mm512_slli_epi32(a.v, N)};
}
template <int N>
CANON VI i_sar(VI a) {
  return {_mm512_srai_epi32(a.v, N)};
}
CANON VF i_to_f(VI a) { return {_mm512_cvtepi32_ps(a.v)}; }
CANON int32_t i_most(VI a) { return _mm512_reduce_max_epi32(a.v); }
CANON float f_most(VF a) { return _mm512_reduce_max_ps(a.v); }
// Sixteen halves, bf16 or binary16, widened exactly.
CANON VF f_load_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
CANON VF f_load_f16(const uint16_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }

#elif defined(VOX_ISA_AVX2)

constexpr int kTileRows = 6;
constexpr int kTilePanels = 1;

struct VF {
  __m256 v, w;
};
struct VI {
  __m256i v, w;
};
CANON VF f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
CANON void f_store(float* p, VF a) {
  _mm256_storeu_ps(p, a.v);
  _mm256_storeu_ps(p + 8, a.w);
}
CANON VI i_load(const int32_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 8))};
}
CANON void i_store(int32_t* p, VI a) {
  _mm256_storeu_si256((__m256i*)p, a.v);
  _mm256_storeu_si256((__m256i*)(p + 8), a.w);
}
CANON VF f_splat(float a) {
  const __m256 s = _mm256_set1_ps(a);
  return {s, s};
}
CANON VI i_splat(int32_t a) {
  const __m256i s = _mm256_set1_epi32(a);
  return {s, s};
}
CANON VF f_add(VF a, VF b) { return {_mm256_add_ps(a.v, b.v), _mm256_add_ps(a.w, b.w)}; }
CANON VF f_sub(VF a, VF b) { return {_mm256_sub_ps(a.v, b.v), _mm256_sub_ps(a.w, b.w)}; }
CANON VF f_mul(VF a, VF b) { return {_mm256_mul_ps(a.v, b.v), _mm256_mul_ps(a.w, b.w)}; }
CANON VF f_div(VF a, VF b) { return {_mm256_div_ps(a.v, b.v), _mm256_div_ps(a.w, b.w)}; }
CANON VF f_sqrt(VF a) { return {_mm256_sqrt_ps(a.v), _mm256_sqrt_ps(a.w)}; }
CANON VF f_fma(VF a, VF b, VF c) { return {_mm256_fmadd_ps(a.v, b.v, c.v), _mm256_fmadd_ps(a.w, b.w, c.w)}; }
CANON VF f_pick_lt(VF a, VF b, VF yes, VF no) {
  return {_mm256_blendv_ps(no.v, yes.v, _mm256_cmp_ps(a.v, b.v, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.w, yes.w, _mm256_cmp_ps(a.w, b.w, _CMP_LT_OQ))};
}
CANON VI f_bits(VF a) { return {_mm256_castps_si256(a.v), _mm256_castps_si256(a.w)}; }
CANON VF f_from(VI a) { return {_mm256_castsi256_ps(a.v), _mm256_castsi256_ps(a.w)}; }
CANON VI i_add(VI a, VI b) { return {_mm256_add_epi32(a.v, b.v), _mm256_add_epi32(a.w, b.w)}; }
CANON VI i_sub(VI a, VI b) { return {_mm256_sub_epi32(a.v, b.v), _mm256_sub_epi32(a.w, b.w)}; }
CANON VI i_xor(VI a, VI b) { return {_mm256_xor_si256(a.v, b.v), _mm256_xor_si256(a.w, b.w)}; }
CANON VI i_and(VI a, VI b) { return {_mm256_and_si256(a.v, b.v), _mm256_and_si256(a.w, b.w)}; }
CANON VI i_or(VI a, VI b) { return {_mm256_or_si256(a.v, b.v), _mm256_or_si256(a.w, b.w)}; }
CANON VI i_max(VI a, VI b) { return {_mm256_max_epi32(a.v, b.v), _mm256_max_epi32(a.w, b.w)}; }
template <int N>
CANON VI i_shl(VI a) {
  return {_mm256_slli_epi32(a.v, N), _mm256_slli_epi32(a.w, N)};
}
template <int N>
CANON VI i_sar(VI a) {
  return {_mm256_srai_epi32(a.v, N), _mm256_srai_epi32(a.w, N)};
}
CANON VF i_to_f(VI a) { return {_mm256_cvtepi32_ps(a.v), _mm256_cvtepi32_ps(a.w)}; }
CANON int32_t i_most(VI a) {
  const __m256i eight = _mm256_max_epi32(a.v, a.w);
  const __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4E));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 0xB1)));
}
CANON float f_most(VF a) {
  const __m256 eight = _mm256_max_ps(a.v, a.w);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
CANON __m256 widen_bf16(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
CANON VF f_load_bf16(const uint16_t* p) {
  return {widen_bf16(_mm_loadu_si128((const __m128i*)p)), widen_bf16(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
CANON VF f_load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}

#else  // NEON

constexpr int kTileRows = 6;
constexpr int kTilePanels = 1;

struct VF {
  float32x4_t v[4];
};
struct VI {
  int32x4_t v[4];
};
#define VOX_EACH(V, expression)          \
  V r;                                   \
  for (int i = 0; i < 4; ++i) r.v[i] = expression; \
  return r;
CANON VF f_load(const float* p) { VOX_EACH(VF, vld1q_f32(p + 4 * i)) }
CANON void f_store(float* p, VF a) {
  for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, a.v[i]);
}
CANON VI i_load(const int32_t* p) { VOX_EACH(VI, vld1q_s32(p + 4 * i)) }
CANON void i_store(int32_t* p, VI a) {
  for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, a.v[i]);
}
CANON VF f_splat(float a) { VOX_EACH(VF, vdupq_n_f32(a)) }
CANON VI i_splat(int32_t a) { VOX_EACH(VI, vdupq_n_s32(a)) }
CANON VF f_add(VF a, VF b) { VOX_EACH(VF, vaddq_f32(a.v[i], b.v[i])) }
CANON VF f_sub(VF a, VF b) { VOX_EACH(VF, vsubq_f32(a.v[i], b.v[i])) }
CANON VF f_mul(VF a, VF b) { VOX_EACH(VF, vmulq_f32(a.v[i], b.v[i])) }
CANON VF f_div(VF a, VF b) { VOX_EACH(VF, vdivq_f32(a.v[i], b.v[i])) }
CANON VF f_sqrt(VF a) { VOX_EACH(VF, vsqrtq_f32(a.v[i])) }
CANON VF f_fma(VF a, VF b, VF c) { VOX_EACH(VF, vfmaq_f32(c.v[i], a.v[i], b.v[i])) }
CANON VF f_pick_lt(VF a, VF b, VF yes, VF no) {
  VOX_EACH(VF, vbslq_f32(vcltq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]))
}
CANON VI f_bits(VF a) { VOX_EACH(VI, vreinterpretq_s32_f32(a.v[i])) }
CANON VF f_from(VI a) { VOX_EACH(VF, vreinterpretq_f32_s32(a.v[i])) }
CANON VI i_add(VI a, VI b) { VOX_EACH(VI, vaddq_s32(a.v[i], b.v[i])) }
CANON VI i_sub(VI a, VI b) { VOX_EACH(VI, vsubq_s32(a.v[i], b.v[i])) }
CANON VI i_xor(VI a, VI b) { VOX_EACH(VI, veorq_s32(a.v[i], b.v[i])) }
CANON VI i_and(VI a, VI b) { VOX_EACH(VI, vandq_s32(a.v[i], b.v[i])) }
CANON VI i_or(VI a, VI b) { VOX_EACH(VI, vorrq_s32(a.v[i], b.v[i])) }
CANON VI i_max(VI a, VI b) { VOX_EACH(VI, vmaxq_s32(a.v[i], b.v[i])) }
template <int N>
CANON VI i_shl(VI a) {
  VOX_EACH(VI, vshlq_n_s32(a.v[i], N))
}
template <int N>
CANON VI i_sar(VI a) {
  VOX_EACH(VI, vshrq_n_s32(a.v[i], N))
}
CANON VF i_to_f(VI a) { VOX_EACH(VF, vcvtq_f32_s32(a.v[i])) }
CANON int32_t i_most(VI a) {
  return vmaxvq_s32(vmaxq_s32(vmaxq_s32(a.v[0], a.v[1]), vmaxq_s32(a.v[2], a.v[3])));
}
CANON float f_most(VF a) {
  return vmaxvq_f32(vmaxq_f32(vmaxq_f32(a.v[0], a.v[1]), vmaxq_f32(a.v[2], a.v[3])));
}
CANON VF f_load_bf16(const uint16_t* p) {
  VOX_EACH(VF, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16)))
}
CANON VF f_load_f16(const uint16_t* p) { VOX_EACH(VF, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)))) }
#undef VOX_EACH

#endif

template <>
struct Splat<VF> {
  CANON VF f(uint32_t bits) { return f_splat(f_from((int32_t)bits)); }
  CANON VI i(uint32_t bits) { return i_splat((int32_t)bits); }
};

// The first `count` lanes of p, the others zero; and the way back.
CANON VF f_load_some(const float* p, int64_t count) {
  float lanes[kLanes] = {};
  __builtin_memcpy(lanes, p, (size_t)count * 4);
  return f_load(lanes);
}
CANON void f_store_some(float* p, VF a, int64_t count) {
  float lanes[kLanes];
  f_store(lanes, a);
  __builtin_memcpy(p, lanes, (size_t)count * 4);
}

// Watches outputs: remembers the largest magnitude as bits, which infinity and NaN exceed.
struct FiniteWatch {
  VI largest = i_splat(0);
  inline __attribute__((always_inline)) void see(VF a) {
    largest = i_max(largest, i_and(f_bits(a), i_splat(0x7FFFFFFF)));
  }
  inline bool saw_only_finite() const { return i_most(largest) < 0x7F800000; }
};

}  // namespace VOX_ISA
}  // namespace vox
