// What the quantised kernels need beside simd.h: 64 code bytes (16 rows x 4 columns) and exact
// integer dots of them with 4 activation codes, in one register, two or four.
//
// A code is at most 63, or a full byte, which has its own dot; an activation lies in [-127, 127].
// Every path returns the same integers: no instruction here can saturate or round.
#pragma once
#include "simd.h"

namespace vox {
namespace VOX_ISA {

CANON int32_t load_i32(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}
// Asks for a line that will be read soon, into the second cache: in the first it would push out what is read
// now. Never faults, so it may point past the end.
CANON void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// body(constant 0), body(constant 1), ...: loops whose index must be known to the compiler.
template <int I>
struct Constant {
  static constexpr int value = I;
};
template <int I, int N>
struct Unroll {
  template <class Body>
  static inline __attribute__((always_inline)) void run(const Body& body) {
    body(Constant<I>{});
    Unroll<I + 1, N>::run(body);
  }
};
template <int N>
struct Unroll<N, N> {
  template <class Body>
  static inline __attribute__((always_inline)) void run(const Body&) {}
};
template <int N, class Body>
CANON void unroll(const Body& body) {
  Unroll<0, N>::run(body);
}

#if defined(VOX_ISA_AVX512)

constexpr int kQuantTile = 12;  // rows of x that share one reading of a group of W
using Bytes = __m512i;
using FullBytes = __m512i;  // q + 128: the unsigned side of vpdpbusd; the sum is corrected by 128 * sum(a)
constexpr int kFullOffsetLog2 = 7;

CANON Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
CANON Bytes low_nibbles(Bytes b) { return _mm512_and_si512(b, _mm512_set1_epi8(15)); }
CANON Bytes high_nibbles(Bytes b) { return _mm512_and_si512(_mm512_srli_epi16(b, 4), _mm512_set1_epi8(15)); }
// b | ((plane << SHIFT) & MASK), a negative SHIFT to the right. The shift works on 16 bits; what it
// carries over from the other byte never lands on a bit of MASK.
template <int SHIFT, int MASK>
CANON Bytes insert_bits(Bytes b, Bytes plane) {
  const Bytes shifted = SHIFT > 0   ? _mm512_slli_epi16(plane, SHIFT > 0 ? SHIFT : 0)
                        : SHIFT < 0 ? _mm512_srli_epi16(plane, SHIFT < 0 ? -SHIFT : 0)
                                    : plane;
  return _mm512_ternarylogic_epi32(b, shifted, _mm512_set1_epi8((char)MASK), 0xF8);
}
CANON FullBytes full_bytes(Bytes b) { return b; }
CANON VI dot_codes(VI sum, Bytes w, int32_t a) { return {_mm512_dpbusd_epi32(sum.v, w, _mm512_set1_epi32(a))}; }
CANON VI dot_full(VI sum, FullBytes w, int32_t a) { return dot_codes(sum, w, a); }

CANON VI i_mul_add(VI a, VI b, VI c) {
  __m512i next = _mm512_add_epi32(_mm512_mullo_epi32(a.v, b.v), c.v);
  // Left alone, gcc puts the products off until those of four sub-blocks wait, and spills them.
  __asm__("" : "+v"(next));
  return {next};
}
CANON VI i_load_u8(const uint8_t* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
CANON VI i_load_i8(const uint8_t* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
// Pairs of bytes [16][2]; sum + pair[0] * a[0] + pair[1] * a[1], `a` being two int16.
using Pairs = __m512i;
CANON Pairs load_pairs(const uint8_t* p) { return _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
CANON VI dot_pairs(VI sum, Pairs w, int32_t a) { return {_mm512_dpwssd_epi32(sum.v, w, _mm512_set1_epi32(a))}; }
// -(a * b) + c with one rounding.
CANON VF f_fnma(VF a, VF b, VF c) { return {_mm512_fnmadd_ps(a.v, b.v, c.v)}; }
// 16 codes of each of four rows as bytes [4][row][4], and the sums of each four.
CANON Bytes pack_codes(VI a, VI b, VI c, VI d) {
  return _mm512_packs_epi16(_mm512_packs_epi32(a.v, b.v), _mm512_packs_epi32(c.v, d.v));
}
CANON VI sums_of_four(Bytes codes) { return {_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), codes)}; }
CANON void store_bytes(int8_t* p, Bytes b) { _mm512_storeu_si512(p, b); }

#elif defined(VOX_ISA_AVX2)

constexpr int kQuantTile = 4;
struct Bytes {
  __m256i v, w;
};
// vpmaddubsw saturates at 32767, and 2 * 255 * 127 is more. So |q| is its unsigned side and the
// activation carries q's sign: a pair is at most 2 * 128 * 127 = 32512. |-128| = 128 fits the unsigned
// side, and what is negated is the activation, which is never -128.
struct FullBytes {
  Bytes magnitude, sign;
};
constexpr int kFullOffsetLog2 = -1;

CANON Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
CANON Bytes low_nibbles(Bytes b) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(b.v, mask), _mm256_and_si256(b.w, mask)};
}
CANON Bytes high_nibbles(Bytes b) {
  return low_nibbles({_mm256_srli_epi16(b.v, 4), _mm256_srli_epi16(b.w, 4)});
}
template <int SHIFT>
CANON __m256i shifted(__m256i b) {
  return SHIFT > 0   ? _mm256_slli_epi16(b, SHIFT > 0 ? SHIFT : 0)
         : SHIFT < 0 ? _mm256_srli_epi16(b, SHIFT < 0 ? -SHIFT : 0)
                     : b;
}
template <int SHIFT, int MASK>
CANON Bytes insert_bits(Bytes b, Bytes plane) {
  const __m256i mask = _mm256_set1_epi8((char)MASK);
  return {_mm256_or_si256(b.v, _mm256_and_si256(shifted<SHIFT>(plane.v), mask)),
          _mm256_or_si256(b.w, _mm256_and_si256(shifted<SHIFT>(plane.w), mask))};
}
CANON FullBytes full_bytes(Bytes b) {
  const __m256i flip = _mm256_set1_epi8((char)0x80);
  const __m256i v = _mm256_xor_si256(b.v, flip), w = _mm256_xor_si256(b.w, flip);
  return {{_mm256_abs_epi8(v), _mm256_abs_epi8(w)}, {v, w}};
}
CANON __m256i dot_half(__m256i sum, __m256i unsigned_side, __m256i signed_side) {
  const __m256i pairs = _mm256_maddubs_epi16(unsigned_side, signed_side);
  __m256i next = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  // Left alone, gcc puts the additions off and spills every product on the way.
  __asm__("" : "+x"(next));
  return next;
}
CANON VI dot_codes(VI sum, Bytes w, int32_t a) {
  const __m256i s = _mm256_set1_epi32(a);
  return {dot_half(sum.v, w.v, s), dot_half(sum.w, w.w, s)};
}
CANON VI dot_full(VI sum, FullBytes w, int32_t a) {
  const __m256i s = _mm256_set1_epi32(a);
  return {dot_half(sum.v, w.magnitude.v, _mm256_sign_epi8(s, w.sign.v)),
          dot_half(sum.w, w.magnitude.w, _mm256_sign_epi8(s, w.sign.w))};
}

CANON VI i_mul_add(VI a, VI b, VI c) {
  return {_mm256_add_epi32(_mm256_mullo_epi32(a.v, b.v), c.v), _mm256_add_epi32(_mm256_mullo_epi32(a.w, b.w), c.w)};
}
CANON VI i_load_u8(const uint8_t* p) {
  return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
CANON VI i_load_i8(const uint8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
          _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
using Pairs = Bytes;
CANON Pairs load_pairs(const uint8_t* p) {
  return {_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)p)),
          _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
CANON VI dot_pairs(VI sum, Pairs w, int32_t a) {
  const __m256i s = _mm256_set1_epi32(a);
  return {_mm256_add_epi32(sum.v, _mm256_madd_epi16(w.v, s)), _mm256_add_epi32(sum.w, _mm256_madd_epi16(w.w, s))};
}
CANON VF f_fnma(VF a, VF b, VF c) { return {_mm256_fnmadd_ps(a.v, b.v, c.v), _mm256_fnmadd_ps(a.w, b.w, c.w)}; }
CANON Bytes pack_codes(VI a, VI b, VI c, VI d) {
  return {_mm256_packs_epi16(_mm256_packs_epi32(a.v, b.v), _mm256_packs_epi32(c.v, d.v)),
          _mm256_packs_epi16(_mm256_packs_epi32(a.w, b.w), _mm256_packs_epi32(c.w, d.w))};
}
CANON __m256i sums_of_four(__m256i codes) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_set1_epi8(1), codes), _mm256_set1_epi16(1));
}
CANON VI sums_of_four(Bytes codes) { return {sums_of_four(codes.v), sums_of_four(codes.w)}; }
CANON void store_bytes(int8_t* p, Bytes b) {
  _mm256_storeu_si256((__m256i*)p, b.v);
  _mm256_storeu_si256((__m256i*)(p + 32), b.w);
}

#else  // NEON

constexpr int kQuantTile = 4;
struct Bytes {
  uint8x16_t v[4];
};
struct FullBytes {
  int8x16_t v[4];
};
constexpr int kFullOffsetLog2 = -1;

#define VOX_EACH(V, expression)                    \
  V r;                                             \
  for (int i = 0; i < 4; ++i) r.v[i] = expression; \
  return r;
CANON Bytes load_bytes(const uint8_t* p) { VOX_EACH(Bytes, vld1q_u8(p + 16 * i)) }
CANON Bytes low_nibbles(Bytes b) { VOX_EACH(Bytes, vandq_u8(b.v[i], vdupq_n_u8(15))) }
CANON Bytes high_nibbles(Bytes b) { VOX_EACH(Bytes, vshrq_n_u8(b.v[i], 4)) }
template <int SHIFT, int MASK>
CANON Bytes insert_bits(Bytes b, Bytes plane) {
  VOX_EACH(Bytes, vorrq_u8(b.v[i], vandq_u8(vshlq_u8(plane.v[i], vdupq_n_s8(SHIFT)), vdupq_n_u8(MASK))))
}
CANON FullBytes full_bytes(Bytes b) { VOX_EACH(FullBytes, vreinterpretq_s8_u8(veorq_u8(b.v[i], vdupq_n_u8(0x80)))) }
CANON int32x4_t dot_quarter(int32x4_t sum, int8x16_t w, int8x16_t a) {
#if defined(VOX_ISA_NEON_DOT)
  return vdotq_s32(sum, w, a);
#else
  // |q * a| <= 128 * 127 fits int16; products are widened to int32 before they meet.
  const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(w), vget_low_s8(a)));
  const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(w), vget_high_s8(a)));
  return vaddq_s32(sum, vpaddq_s32(low, high));
#endif
}
CANON VI dot_codes(VI sum, Bytes w, int32_t a) {
  const int8x16_t s = vreinterpretq_s8_s32(vdupq_n_s32(a));
  VOX_EACH(VI, dot_quarter(sum.v[i], vreinterpretq_s8_u8(w.v[i]), s))
}
CANON VI dot_full(VI sum, FullBytes w, int32_t a) {
  const int8x16_t s = vreinterpretq_s8_s32(vdupq_n_s32(a));
  VOX_EACH(VI, dot_quarter(sum.v[i], w.v[i], s))
}

CANON VI i_mul_add(VI a, VI b, VI c) { VOX_EACH(VI, vmlaq_s32(c.v[i], a.v[i], b.v[i])) }
CANON VI i_load_u8(const uint8_t* p) {
  const uint8x16_t x = vld1q_u8(p);
  const uint16x8_t low = vmovl_u8(vget_low_u8(x)), high = vmovl_u8(vget_high_u8(x));
  return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
           vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
CANON VI i_load_i8(const uint8_t* p) {
  const int8x16_t x = vreinterpretq_s8_u8(vld1q_u8(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(x)), high = vmovl_s8(vget_high_s8(x));
  return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
           vmovl_s16(vget_high_s16(high))}};
}
struct Pairs {
  int16x8_t v[4];
};
CANON Pairs load_pairs(const uint8_t* p) { VOX_EACH(Pairs, vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 8 * i)))) }
CANON VI dot_pairs(VI sum, Pairs w, int32_t a) {
  const int16x8_t s = vreinterpretq_s16_s32(vdupq_n_s32(a));
  VOX_EACH(VI, vaddq_s32(sum.v[i], vpaddq_s32(vmull_s16(vget_low_s16(w.v[i]), vget_low_s16(s)),
                                              vmull_s16(vget_high_s16(w.v[i]), vget_high_s16(s)))))
}
CANON VF f_fnma(VF a, VF b, VF c) { VOX_EACH(VF, vfmsq_f32(c.v[i], a.v[i], b.v[i])) }
CANON Bytes pack_codes(VI a, VI b, VI c, VI d) {
  VOX_EACH(Bytes, vreinterpretq_u8_s8(vcombine_s8(vmovn_s16(vcombine_s16(vmovn_s32(a.v[i]), vmovn_s32(b.v[i]))),
                                                  vmovn_s16(vcombine_s16(vmovn_s32(c.v[i]), vmovn_s32(d.v[i]))))))
}
CANON VI sums_of_four(Bytes codes) { VOX_EACH(VI, vpaddlq_s16(vpaddlq_s8(vreinterpretq_s8_u8(codes.v[i])))) }
CANON void store_bytes(int8_t* p, Bytes b) {
  for (int i = 0; i < 4; ++i) vst1q_s8(p + 16 * i, vreinterpretq_s8_u8(b.v[i]));
}
#undef VOX_EACH

#endif

}  // namespace VOX_ISA
}  // namespace vox
