// The canonical arithmetic: every operation below is one correctly rounded binary32 operation,
// with subnormal inputs and results flushed to zero by the environment (docs/numerics.md).
//
// Written over a value type V: `float` here, and the vectors of simd.h, which overload the same
// names. So the text of exp, log, ... exists once for scalar, SIMD and GPU code. Constants are
// bit patterns, since no two compilers agree on how to read a decimal.
#pragma once
#if defined(VOX_CUDA) || defined(VOX_METAL)
#include "grid/target.h"
#else
#include <stddef.h>
#include <stdint.h>

#define CANON static inline __attribute__((always_inline))
#define VOX_FMA(a, b, c) __builtin_fmaf(a, b, c)
#define VOX_SQRT(a) __builtin_sqrtf(a)
#define VOX_CAST(To, a) vox::bits_as<To>(a)
namespace vox {
template <class To, class From>
CANON To bits_as(From from) {
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace vox
#endif

#ifndef VOX_ISA
#define VOX_ISA scalar
#endif

namespace vox {
namespace VOX_ISA {

// --- float ---------------------------------------------------------------------------------
CANON float f_add(float a, float b) { return a + b; }
CANON float f_sub(float a, float b) { return a - b; }
CANON float f_mul(float a, float b) { return a * b; }
CANON float f_fma(float a, float b, float c) { return VOX_FMA(a, b, c); }
CANON float f_div(float a, float b) { return a / b; }
CANON float f_sqrt(float a) { return VOX_SQRT(a); }
CANON int32_t f_bits(float a) { return VOX_CAST(int32_t, a); }
CANON float f_from(int32_t bits) { return VOX_CAST(float, bits); }
// -(a * b) + c with one rounding.
CANON float f_fnma(float a, float b, float c) { return f_fma(-a, b, c); }
// a < b ? yes : no; moves bits and changes none.
CANON float f_pick_lt(float a, float b, float yes, float no) { return a < b ? yes : no; }
CANON int32_t i_add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
CANON int32_t i_sub(int32_t a, int32_t b) { return (int32_t)((uint32_t)a - (uint32_t)b); }
CANON int32_t i_xor(int32_t a, int32_t b) { return a ^ b; }
CANON int32_t i_and(int32_t a, int32_t b) { return a & b; }
CANON int32_t i_or(int32_t a, int32_t b) { return a | b; }
template <int N>
CANON int32_t i_shl(int32_t a) {
  return (int32_t)((uint32_t)a << N);
}
// Arithmetic shift.
template <int N>
CANON int32_t i_sar(int32_t a) {
  return a >> N;
}
CANON float i_to_f(int32_t a) { return (float)a; }
CANON bool is_finite(float a) { return (f_bits(a) & 0x7FFFFFFF) < 0x7F800000; }

// A constant given by its bits, in every lane of V.
template <class V>
struct Splat;
template <>
struct Splat<float> {
  CANON float f(uint32_t bits) { return f_from((int32_t)bits); }
  CANON int32_t i(uint32_t bits) { return (int32_t)bits; }
};
#define F_CONST(V, bits) (Splat<V>::f(bits))
#define I_CONST(V, bits) (Splat<V>::i(bits))

// --- elementary functions --------------------------------------------------------------------
template <class V>
CANON V f_min(V a, V b) {
  return f_pick_lt(a, b, a, b);
}
template <class V>
CANON V f_max(V a, V b) {
  return f_pick_lt(a, b, b, a);
}
template <class V>
CANON V f_neg(V a) {
  return f_from(i_xor(f_bits(a), I_CONST(V, 0x80000000u)));
}

// e^x for finite x <= 88; +0 below -87.
template <class V>
CANON V f_exp(V x) {
  const V magic = F_CONST(V, 0x4B400000u);                        // 1.5 * 2^23: adding it rounds to an integer
  const V t = f_fma(x, F_CONST(V, 0x3FB8AA3Bu), magic);           // log2(e)
  const V n = f_sub(t, magic);
  V r = f_fma(n, F_CONST(V, 0xBF317200u), x);                     // -ln 2, the upper 15 bits: exact
  r = f_fma(n, F_CONST(V, 0xB5BFBE8Eu), r);                       // -ln 2, the rest
  V p = F_CONST(V, 0x3AB5639Du);
  p = f_fma(p, r, F_CONST(V, 0x3C091EF0u));
  p = f_fma(p, r, F_CONST(V, 0x3D2AAC2Cu));
  p = f_fma(p, r, F_CONST(V, 0x3E2AAA46u));
  p = f_fma(p, r, F_CONST(V, 0x3EFFFFFEu));
  p = f_fma(p, r, F_CONST(V, 0x3F800000u));
  p = f_fma(p, r, F_CONST(V, 0x3F800000u));
  // The integer n sits in the low bits of t; the rest of t is shifted out.
  const V y = f_from(i_add(f_bits(p), i_shl<23>(f_bits(t))));
  return f_pick_lt(x, F_CONST(V, 0xC2AE0000u), F_CONST(V, 0x00000000u), y);
}

// ln x for finite x >= 2^-126.
template <class V>
CANON V f_log(V x) {
  const auto bits = f_bits(x);
  // x = 2^e * m with m in [sqrt(1/2), sqrt(2)).
  const auto e = i_sar<23>(i_add(bits, I_CONST(V, 0xC0CAFB0Du)));  // -0x3F3504F3
  const V m = f_from(i_sub(bits, i_shl<23>(e)));
  const V n = i_to_f(e);
  const V f = f_sub(m, F_CONST(V, 0x3F800000u));
  const V z = f_mul(f, f);
  V p = F_CONST(V, 0x3D5AC715u);
  p = f_fma(p, f, F_CONST(V, 0xBDDF91ECu));
  p = f_fma(p, f, F_CONST(V, 0x3DF7F82Eu));
  p = f_fma(p, f, F_CONST(V, 0xBE0081F1u));
  p = f_fma(p, f, F_CONST(V, 0x3E1181B7u));
  p = f_fma(p, f, F_CONST(V, 0xBE2A978Cu));
  p = f_fma(p, f, F_CONST(V, 0x3E4CD2A0u));
  p = f_fma(p, f, F_CONST(V, 0xBE800038u));
  p = f_fma(p, f, F_CONST(V, 0x3EAAAAA4u));
  V t = f_mul(f_mul(z, f), p);
  t = f_fma(n, F_CONST(V, 0x35BFBE8Eu), t);
  t = f_fma(z, F_CONST(V, 0xBF000000u), t);
  t = f_add(f, t);
  return f_fma(n, F_CONST(V, 0x3F317200u), t);
}

// x / (1 + e^-x)
template <class V>
CANON V f_silu(V x) {
  const V e = f_exp(f_min(f_neg(x), F_CONST(V, 0x42B00000u)));  // 88
  return f_div(x, f_add(F_CONST(V, 0x3F800000u), e));
}

// x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3): the tanh form of GELU without its cancellation.
template <class V>
CANON V f_gelu_tanh(V x) {
  const V z = f_mul(x, x);
  const V w = f_fma(z, F_CONST(V, 0xBD922279u), F_CONST(V, 0xBFCC422Au));
  const V e = f_exp(f_min(f_mul(x, w), F_CONST(V, 0x42B00000u)));
  return f_div(x, f_add(F_CONST(V, 0x3F800000u), e));
}

template <class V>
CANON V f_tanh(V x) {
  const auto sign = i_and(f_bits(x), I_CONST(V, 0x80000000u));
  const V a = f_from(i_xor(f_bits(x), sign));
  // Near zero 1 - e^-2a would cancel: an odd polynomial instead.
  const V z = f_mul(a, a);
  V p = F_CONST(V, 0xBBBA8671u);
  p = f_fma(p, z, F_CONST(V, 0x3CA8FC67u));
  p = f_fma(p, z, F_CONST(V, 0xBD5C1AD2u));
  p = f_fma(p, z, F_CONST(V, 0x3E08837Bu));
  p = f_fma(p, z, F_CONST(V, 0xBEAAAA99u));
  const V small = f_fma(f_mul(p, z), a, a);
  const V one = F_CONST(V, 0x3F800000u);
  const V e = f_exp(f_mul(a, F_CONST(V, 0xC0000000u)));  // e^(-2a)
  const V large = f_div(f_sub(one, e), f_add(one, e));
  const V y = f_pick_lt(a, F_CONST(V, 0x3F200000u), small, large);  // 0.625
  return f_from(i_or(f_bits(y), sign));
}

}  // namespace VOX_ISA
}  // namespace vox
