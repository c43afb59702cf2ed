// Gradients of the forward's operators, but for products and attention: docs/numerics.md, section 12.
#pragma once
#include "../definitions_backward.h"
#include "elementwise.h"
#include "group.h"
#include "rope.h"

VOX_ROPE(vox_rope_backward, rotated_back)
VOX_OF_TWO(vox_softcap_backward, softcap_gradient(a, b, args.value))

#define VOX_GATE_BACKWARD(name, slope)                                                                          \
  VOX_KERNEL(name)(VOX_IN(float, dy, 0), VOX_IN(float, gate, 1), VOX_IN(float, up, 2), VOX_OUT(float, dgate, 3), \
                   VOX_OUT(float, dup, 4), VOX_OUT(int32_t, faults, 5), VOX_ARGS(ElementwiseArgs, 6)) {         \
    const int64_t at = VOX_THREAD_X;                                                                            \
    if (at >= (int64_t)args.rows * args.width) return;                                                          \
    const GateGradients<float> d = gate_gradients(dy[at], up[at], slope(gate[at]));                             \
    dgate[at] = d.gate;                                                                                         \
    dup[at] = d.up;                                                                                             \
    VOX_WATCH(d.gate, at / args.width);                                                                         \
    VOX_WATCH(d.up, at / args.width);                                                                           \
  }
VOX_GATE_BACKWARD(vox_silu_gate_backward, f_silu_slope)
VOX_GATE_BACKWARD(vox_gelu_gate_backward, f_gelu_tanh_slope)
#undef VOX_GATE_BACKWARD

VOX_KERNEL(vox_norm_backward)(VOX_IN(float, dy, 0), VOX_IN(float, x, 1), VOX_IN(float, weight, 2),
                              VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(NormArgs, 5)) {
  VOX_SHARED float chunks[kGroup];
  const int64_t start = (VOX_GROUP_Y * args.heads + VOX_GROUP_X) * args.width;
  NormSums sums = {0.0f, 0.0f};
  for (int32_t first = 0; first * (int32_t)kChunk < args.width; first += kGroup) {
    NormSums p = {0.0f, 0.0f};
    for (int32_t k = 0; k < (int32_t)kChunk; ++k) {
      const int32_t i = (first + VOX_LOCAL) * (int32_t)kChunk + k;
      if (i < args.width) p = norm_step(dy[start + i], x[start + i], weight[i], p);
    }
    const int count = chunks_of_round(args.width, first);
    sums.squares = group_chunks_folded(first == 0, sums.squares, p.squares, count, chunks, VOX_LOCAL);
    sums.products = group_chunks_folded(first == 0, sums.products, p.products, count, chunks, VOX_LOCAL);
  }
  const float inverse = norm_inverse(sums.squares, (float)args.width, args.eps);
  const float c = norm_share(sums.products, inverse, (float)args.width);
  for (int32_t i = VOX_LOCAL; i < args.width; i += kGroup) {
    // An infinite sum would make the inverse zero, and hide: the row is NaN instead.
    const float y = is_finite(sums.squares) ? norm_gradient(dy[start + i], x[start + i], weight[i], inverse, c)
                                            : f_from(0x7FC00000);
    out[start + i] = y;
    VOX_WATCH(y, VOX_GROUP_Y);
  }
}
