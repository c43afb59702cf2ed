// The canonical arithmetic: every operation below is one correctly rounded binary32 operation,
// with subnormal inputs and results flushed to zero by the environment (docs/numerics.md).
//
// Written over a value type V: `float` here, and the vectors of simd.h, which overload the same
// names. So the text of exp, log, ... exists once for scalar, SIMD and GPU code. Constants are
// bit patterns, since no two compilers agree on how to read a decimal.
#pragma once
#include <stdint.h>

#define CANON static inline __attribute__((always_inline))

#ifndef VOX_ISA
#define VOX_ISA scalar
#endif

namespace vox {
namespace VOX_ISA {

// --- float ---------------------------------------------------------------------------------
CANON float f_add(float a, float b) { return a + b; }
CANON float f_sub(float a, float b) { return a - b; }
CANON float f_mul(float a, float b) { return a * b; }
CANON float f_fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
CANON float f_div(float a, float b) { return a / b; }
CANON float f_sqrt(float a) { return __builtin_sqrtf(a); }
CANON int32_t f_bits(float a) {
  int32_t bits;
  __builtin_memcpy(&bits, &a, 4);
  return bits;
}
CANON float f_from(int32_t bits) {
  float a;
  __builtin_memcpy(&a, &bits, 4);
  return a;
}
// a < b ? yes : no
CANON float f_pick_lt(float a, float b, float yes, float no) { return a < b ? yes : no; }
CANON int32_t i_add(int32_t a, int32_t b) { return (int32_t)((uint32_t)a + (uint32_t)b); }
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

// A constant given by its bits, in every lane of V.
template <class V>
struct Splat;
template <>
struct Splat<float> {
  static inline __attribute__((always_inline)) float f(uint32_t bits) { return f_from((int32_t)bits); }
  static inline __attribute__((always_inline)) int32_t i(uint32_t bits) { return (int32_t)bits; }
};
#define F_CONST(V, bits) (Splat<V>::f(bits))
#define I_CONST(V, bits) (Splat<V>::i(bits))

}  // namespace VOX_ISA
}  // namespace vox
