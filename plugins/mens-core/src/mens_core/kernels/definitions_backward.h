// What the backward of each operator does to one value or one output, written once for every target as in
// definitions.h: docs/numerics.md, section 12.
#pragma once
#include "canon_backward.h"
#include "definitions.h"

namespace vox {
namespace VOX_ISA {

// --- norm --------------------------------------------------------------------------------------

struct NormSums {
  float squares, products;  // C128 of x x, and of (dy w) x
};
CANON NormSums norm_step(float dy, float x, float weight, NormSums p) {
  return {f_fma(x, x, p.squares), f_fma(f_mul(dy, weight), x, p.products)};
}
// c, what the normed row is taken off with.
CANON float norm_share(float products, float inverse, float width) { return f_div(f_mul(products, inverse), width); }
// (g - (x inv) c) inv, g being dy w
template <class V>
CANON V norm_gradient_of(V g, V x, V inverse, V c) {
  return f_mul(f_fma(f_neg(f_mul(x, inverse)), c, g), inverse);
}
template <class V>
CANON V norm_gradient(V dy, V x, V weight, V inverse, V c) {
  return norm_gradient_of(f_mul(dy, weight), x, inverse, c);
}

// --- rope ----------------------------------------------------------------------------------------

template <class V>
CANON Halves<V> rotated_back(V d1, V d2, V cosine, V sine) {
  return {f_fma(d1, cosine, f_mul(d2, sine)), f_fma(d2, cosine, f_neg(f_mul(d1, sine)))};
}

// --- gates and softcap -----------------------------------------------------------------------------

template <class V>
struct GateGradients {
  V gate, up;
};
template <class V>
CANON GateGradients<V> gate_gradients(V dy, V up, Activation<V> of_gate) {
  return {f_mul(f_mul(dy, up), of_gate.slope), f_mul(dy, of_gate.value)};
}
template <class V>
CANON V softcap_gradient(V dy, V x, V cap) {
  return f_mul(dy, f_tanh_slope(f_div(x, cap)));
}

// --- attention ---------------------------------------------------------------------------------------

// P and dS of a visible pair, from the dot products q k and dy v.
template <class V>
struct PairGradients {
  V probability, score;
};
template <class V>
CANON PairGradients<V> pair_gradients(V qk, V dyv, V scale, bool has_cap, V cap, V m, V l, V delta) {
  const V x = f_mul(qk, scale);
  V score = x, ratio = x;
  if (has_cap) {
    ratio = f_div(x, cap);
    score = f_mul(cap, f_tanh(ratio));
  }
  const V probability = f_div(f_exp(f_sub(score, m)), l);
  V gradient = f_mul(probability, f_sub(dyv, delta));
  if (has_cap) gradient = f_mul(gradient, f_tanh_slope(ratio));
  return {probability, gradient};
}

}  // namespace VOX_ISA
}  // namespace vox
