// What each operator does to one value, one output or one row, written once for every target:
// scalar code, the sixteen lanes of simd.h, CUDA and Metal (docs/numerics.md has the same as text).
// Loops, memory and threads are the callers' business, and so are C128's chunks: a chain is a loop
// over one of the steps below, started at +0.
//
// V is a float or a vector of them, I the integer that goes with it. Values go in and out by value: a
// pointer would need an address space on a GPU.
#pragma once
#include "canon.h"

namespace vox {
namespace VOX_ISA {

// --- C128 ------------------------------------------------------------------------------------

struct SumOfSquares {
  CANON float step(float x, float p) { return f_fma(x, x, p); }
};
struct PlainSum {
  CANON float step(float x, float p) { return f_add(p, x); }  // fma(1, x, p)
};
// The sum of chunks so far, after one more.
template <class V>
CANON V chunk_folded(bool is_first, V total, V chunk) {
  return is_first ? chunk : f_add(total, chunk);
}

// --- norm --------------------------------------------------------------------------------------

CANON float norm_inverse(float sum_of_squares, float width, float eps) {
  const float mean = f_div(sum_of_squares, width);
  return f_div(F_CONST(float, 0x3F800000u), f_sqrt(f_add(mean, eps)));
}
template <class V>
CANON V normed(V x, V inverse, V weight) {
  return f_mul(f_mul(x, inverse), weight);
}

// --- rope ----------------------------------------------------------------------------------------

template <class V>
struct Halves {
  V first, second;
};
template <class V>
CANON Halves<V> rotated(V x1, V x2, V cosine, V sine) {
  return {f_fma(x1, cosine, f_neg(f_mul(x2, sine))), f_fma(x2, cosine, f_mul(x1, sine))};
}

// --- gates and softcap -----------------------------------------------------------------------------

template <class V>
CANON V silu_gated(V gate, V up) {
  return f_mul(f_silu(gate), up);
}
template <class V>
CANON V gelu_gated(V gate, V up) {
  return f_mul(f_gelu_tanh(gate), up);
}
template <class V>
CANON V f_softcap(V x, V cap) {
  return f_mul(cap, f_tanh(f_div(x, cap)));
}

// --- adapters ----------------------------------------------------------------------------------------

template <class V>
CANON V scaled_sum(V y, V x, V factor) {
  return f_add(y, f_mul(x, factor));
}

// --- attention ---------------------------------------------------------------------------------------

// m after one more block, and what the old and the new (l, o) are multiplied with.
struct Shares {
  float m, old_share, new_share;
};
CANON Shares shares_of(float m, float m_block) {
  const float larger = f_max(m, m_block);
  return {larger, f_exp(f_sub(m, larger)), f_exp(f_sub(m_block, larger))};
}
// l or a channel of o after one more block.
template <class V>
CANON V block_folded(V old, V old_share, V fresh, V new_share) {
  return f_fma(old, old_share, f_mul(fresh, new_share));
}

// --- quantised weights -----------------------------------------------------------------------------------

// amax of a block of activations, as bits, to its scale; 0: all codes are 0; NaN: not finite.
CANON float activation_scale(int32_t amax_bits) {
  if (amax_bits >= 0x7F800000) return f_from(0x7FC00000);
  return f_div(f_from(amax_bits), F_CONST(float, 0x42FE0000u));  // 127
}
CANON bool has_codes(float scale) { return scale > 0.0f; }
CANON float activation_inverse(int32_t amax_bits) { return f_div(F_CONST(float, 0x42FE0000u), f_from(amax_bits)); }
// Adding 1.5 * 2^23 rounds |v| < 2^22 to an integer, ties to even, and leaves it in the low bits.
CANON int32_t activation_code(float x, float inverse) {
  return i_sub(f_bits(f_add(f_mul(x, inverse), F_CONST(float, 0x4B400000u))), 0x4B400000);
}

// A chain over blocks of 32: p after a block whose integer dot is `dot`.
template <class V, class I>
CANON V block_chained(V p, V weight_scale, V x_scale, I dot) {
  return f_fma(f_mul(weight_scale, x_scale), i_to_f(dot), p);
}
// A super-block: p of U, then what the minima take off.
template <class V, class I>
CANON V less_minima(V p, V weight_minimum, V x_scale, I dot) {
  return f_fnma(f_mul(weight_minimum, x_scale), i_to_f(dot), p);
}

// One weight in float32, from its code.
CANON float weight_of(float d, int32_t code) { return f_mul(i_to_f(code), d); }
CANON float weight_of(float d, int32_t scale, int32_t code) { return f_mul(f_mul(d, i_to_f(scale)), i_to_f(code)); }
CANON float weight_of(float d, int32_t scale, int32_t code, float dmin, int32_t minimum) {
  return f_sub(weight_of(d, scale, code), f_mul(dmin, i_to_f(minimum)));
}

// --- float16 and bfloat16, exactly; no flush concerns a float16 --------------------------------------------

CANON float f16_to_f32(uint32_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31u, fraction = bits & 0x3FFu;
  if (exponent == 31u) return f_from((int32_t)(sign | 0x7F800000u | fraction << 13));
  if (exponent != 0u) return f_from((int32_t)(sign | (exponent + 112u) << 23 | fraction << 13));
  const float magnitude = f_mul(i_to_f((int32_t)fraction), F_CONST(float, 0x33800000u));  // 2^-24
  return f_from(f_bits(magnitude) | (int32_t)sign);
}
CANON float bf16_to_f32(uint32_t bits) { return f_from((int32_t)(bits << 16)); }

// --- choosing tokens -------------------------------------------------------------------------------------

CANON float penalised(float x, float repetition, float subtract) {
  return f_sub(0.0f < x ? f_div(x, repetition) : f_mul(x, repetition), subtract);
}
// exp((x - max) / T), the numerator of a softmax at temperature T.
template <class V>
CANON V tempered(V x, V max, V temperature) {
  return f_exp(f_div(f_sub(x, max), temperature));
}
// floor(e * 2^32) for e in [0, 1]: exact, the product only moves the exponent.
CANON uint64_t fixed_point_32(float e) { return (uint64_t)(int64_t)f_mul(e, f_from(0x4F800000)); }
// log is defined for finite numbers: a sum that is not is passed on as it is.
CANON float normaliser(float max, float sum) { return is_finite(sum) ? f_add(max, f_log(sum)) : sum; }

}  // namespace VOX_ISA
}  // namespace vox
