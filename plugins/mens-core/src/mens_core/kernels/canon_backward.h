// Derivatives of the elementary functions: docs/numerics.md, section 12. Over a value type V, as canon.h.
#pragma once
#include "canon.h"

namespace vox {
namespace VOX_ISA {

// 1 - tanh(x)^2 = 4 e / (1 + e)^2 with e = e^(-2|x|): no cancellation at either end.
template <class V>
CANON V f_tanh_slope(V x) {
  const V a = f_from(i_and(f_bits(x), I_CONST(V, 0x7FFFFFFFu)));
  const V e = f_exp(f_mul(a, F_CONST(V, 0xC0000000u)));
  const V u = f_div(F_CONST(V, 0x40000000u), f_add(F_CONST(V, 0x3F800000u), e));
  return f_mul(f_mul(e, u), u);
}

// An activation and its derivative.
template <class V>
struct Activation {
  V value, slope;
};

template <class V>
CANON Activation<V> f_silu_slope(V x) {
  const V one = F_CONST(V, 0x3F800000u);
  const V e = f_exp(f_min(f_neg(x), F_CONST(V, 0x42B00000u)));  // 88
  const V d = f_add(one, e);
  const V s = f_div(x, d), r = f_div(one, d);
  return {s, f_fma(s, f_mul(e, r), r)};
}

template <class V>
CANON Activation<V> f_gelu_tanh_slope(V x) {
  const V one = F_CONST(V, 0x3F800000u);
  const V z = f_mul(x, x);
  const V w = f_fma(z, F_CONST(V, 0xBD922279u), F_CONST(V, 0xBFCC422Au));
  const V e = f_exp(f_min(f_mul(x, w), F_CONST(V, 0x42B00000u)));
  const V d = f_add(one, e);
  const V s = f_div(x, d), r = f_div(one, d);
  // Minus the exponent's derivative. Where the bound is felt, e r is zero, and infinity would make it NaN.
  const V n = f_fma(f_min(z, F_CONST(V, 0x43000000u)), F_CONST(V, 0x3E5B33B6u), F_CONST(V, 0x3FCC422Au));
  return {s, f_fma(f_mul(s, f_mul(e, r)), n, r)};
}

}  // namespace VOX_ISA
}  // namespace vox
