// What loss, adapters, dropout and the update do to one value, written once for every target as in
// definitions.h: docs/numerics.md, section 13.
#pragma once
#include "definitions.h"

namespace vox {
namespace VOX_ISA {

// --- loss --------------------------------------------------------------------------------------

// Of a row with the logit `target` at its target; a sum that is not finite is the loss itself.
CANON float row_loss(float max, float sum, float target) {
  return is_finite(sum) ? f_sub(normaliser(max, sum), target) : sum;
}
// The loss's derivative at the target, from its probability.
CANON float target_gradient(float probability) { return f_sub(probability, F_CONST(float, 0x3F800000u)); }

// --- Philox4x32-10 ---------------------------------------------------------------------------------

// Both halves of a product of 64 bits.
template <class I>
struct WordProduct {
  I high, low;
};
CANON WordProduct<int32_t> multiply_words(int32_t a, uint32_t by) {
  const uint64_t product = (uint64_t)(uint32_t)a * by;
  return {(int32_t)(uint32_t)(product >> 32), (int32_t)(uint32_t)product};
}

template <class I>
struct Words {
  I word[4];
};
// V is the value type that goes with I.
template <class V, class I>
CANON Words<I> philox(Words<I> c, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; ++round) {
    const WordProduct<I> p0 = multiply_words(c.word[0], 0xD2511F53u), p1 = multiply_words(c.word[2], 0xCD9E8D57u);
    c.word[0] = i_xor(i_xor(p1.high, c.word[1]), I_CONST(V, k0));
    c.word[1] = p1.low;
    c.word[2] = i_xor(i_xor(p0.high, c.word[3]), I_CONST(V, k1));
    c.word[3] = p0.low;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return c;
}

// --- dropout ---------------------------------------------------------------------------------------

// Word 1 of the counter: the index of a row's example, and that of four of its columns.
CANON uint32_t dropout_place(uint32_t example, uint32_t four_columns) { return example << 16 | four_columns; }
// All ones where a < b as unsigned words: the borrow of a - b.
template <class V, class I>
CANON I i_below(I a, I b) {
  const I not_a = i_xor(a, I_CONST(V, 0xFFFFFFFFu)), equal = i_xor(not_a, b);
  return i_sar<31>(i_or(i_and(not_a, b), i_and(equal, i_sub(a, b))));
}
template <class V, class I>
CANON V dropped(V x, I word, I threshold, V factor) {
  const I is_kept = i_xor(i_below<V>(word, threshold), I_CONST(V, 0xFFFFFFFFu));
  return f_from(i_and(f_bits(f_mul(x, factor)), is_kept));
}

// --- the update --------------------------------------------------------------------------------------

template <class V>
struct AdamWTerms {
  V learning_rate, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, correction1, correction2;
};
template <class V>
struct Moments {
  V parameter, m, v;
};
template <class V>
CANON Moments<V> adamw_step(V parameter, V g, V m, V v, AdamWTerms<V> by) {
  m = f_fma(by.beta1, m, f_mul(by.one_minus_beta1, g));
  v = f_fma(by.beta2, v, f_mul(by.one_minus_beta2, f_mul(g, g)));
  const V root = f_sqrt(f_div(v, by.correction2));
  const V step = f_div(f_div(m, by.correction1), f_add(root, by.eps));
  parameter = f_sub(f_mul(parameter, by.decay), f_mul(by.learning_rate, step));
  return {parameter, m, v};
}

}  // namespace VOX_ISA
}  // namespace vox
