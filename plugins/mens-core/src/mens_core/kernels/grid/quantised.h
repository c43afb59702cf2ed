// Quantised weights: activations to int8, linear, embedding rows (docs/numerics.md, 10).
#pragma once
#include "elementwise.h"
#include "quant_blocks.h"

namespace vox {
namespace VOX_ISA {

// codes [rows][columns], scales [rows][columns / size].
CANON void quantise_block(VOX_DEVICE const float* x, VOX_DEVICE int8_t* codes, VOX_DEVICE float* scale, int32_t size) {
  int32_t amax = 0;  // as bits
  for (int32_t i = 0; i < size; ++i) {
    const int32_t magnitude = f_bits(x[i]) & 0x7FFFFFFF;
    amax = magnitude > amax ? magnitude : amax;
  }
  const float d = activation_scale(amax);
  *scale = d;
  if (!has_codes(d)) {
    for (int32_t i = 0; i < size; ++i) codes[i] = 0;
    return;
  }
  const float inverse = activation_inverse(amax);
  for (int32_t i = 0; i < size; ++i) codes[i] = (int8_t)activation_code(x[i], inverse);
}

// One output, over blocks of 32: four of them are a chunk.
template <class F>
CANON float dot_of_blocks32(BlockBytes w, VOX_DEVICE const int8_t* codes, VOX_DEVICE const float* scales, int32_t blocks) {
  float y = 0.0f, p = 0.0f;
  for (int32_t b = 0; b < blocks; ++b, w += F::bytes) {
    if (b % 4 == 0) p = 0.0f;
    int32_t dot = 0;
    for (int32_t i = 0; i < 32; ++i) dot += F::code(w, i) * codes[b * 32 + i];
    p = block_chained(p, F::d(w), scales[b], dot);
    if (b % 4 == 3 || b == blocks - 1) y = chunk_folded(b < 4, y, p);
  }
  return y;
}

// One output, over super-blocks: one is a chunk.
template <class F>
CANON float dot_of_blocks256(BlockBytes w, VOX_DEVICE const int8_t* codes, VOX_DEVICE const float* scales, int32_t blocks) {
  float y = 0.0f;
  for (int32_t b = 0; b < blocks; ++b, w += F::bytes) {
    int32_t u = 0, v = 0;
    for (int32_t j = 0; j < 256 / F::sub; ++j) {
      int32_t dot = 0, sum = 0;
      for (int32_t i = j * F::sub; i < (j + 1) * F::sub; ++i) {
        const int32_t a = codes[b * 256 + i];
        dot += F::code(w, i) * a;
        sum += a;
      }
      u += F::scale(w, j) * dot;
      if (F::has_minima) v += F::minimum(w, j) * sum;
    }
    float p = block_chained(0.0f, F::d(w), scales[b], u);
    if (F::has_minima) p = less_minima(p, F::dmin(w), scales[b], v);
    y = chunk_folded(b == 0, y, p);
  }
  return y;
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_QUANTISE(name, size)                                                                                    \
  VOX_KERNEL(name)(VOX_IN(float, x, 0), VOX_OUT(int8_t, codes, 1), VOX_OUT(float, scales, 2), VOX_ARGS(QuantiseArgs, 3)) { \
    const int64_t blocks = args.columns / size, first = VOX_THREAD_Y * args.columns + VOX_THREAD_X * size;          \
    if (VOX_THREAD_X < blocks)                                                                                      \
      quantise_block(x + first, codes + first, scales + VOX_THREAD_Y * blocks + VOX_THREAD_X, size);                \
  }
VOX_QUANTISE(vox_quantise_32, 32)
VOX_QUANTISE(vox_quantise_256, 256)
#undef VOX_QUANTISE

#define VOX_QUANTISED(suffix, F, size)                                                                                \
  VOX_KERNEL(vox_embed_##suffix)(VOX_IN(uint8_t, table, 0), VOX_IN(int32_t, ids, 1), VOX_OUT(float, out, 2),          \
                                 VOX_OUT(int32_t, faults, 3), VOX_ARGS(EmbedArgs, 4)) {                               \
    if (VOX_THREAD_X >= args.columns) return;                                                                         \
    const int64_t block = (int64_t)ids[VOX_THREAD_Y] * (args.columns / size) + VOX_THREAD_X / size;                   \
    const float w = block_weight##size<F>(table + block * F::bytes, (int32_t)(VOX_THREAD_X % size));                  \
    const float y = f_mul(w, args.scale);                                                                             \
    out[VOX_THREAD_Y * args.columns + VOX_THREAD_X] = y;                                                              \
    VOX_WATCH(y, VOX_THREAD_Y);                                                                                       \
  }                                                                                                                   \
  VOX_KERNEL(vox_linear_##suffix)(VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(uint8_t, weight, 2),     \
                                  VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(LinearArgs, 5)) {     \
    if (VOX_THREAD_X >= args.outputs) return;                                                                         \
    const int64_t blocks = args.columns / size;                                                                       \
    const float y = dot_of_blocks##size<F>(weight + VOX_THREAD_X * blocks * F::bytes,                                 \
                                           codes + VOX_THREAD_Y * args.columns, scales + VOX_THREAD_Y * blocks,       \
                                           (int32_t)blocks);                                                          \
    out[VOX_THREAD_Y * args.outputs + VOX_THREAD_X] = y;                                                              \
    VOX_WATCH(y, VOX_THREAD_Y);                                                                                       \
  }
VOX_QUANTISED(q8_0, FileQ8_0, 32)
VOX_QUANTISED(q5_0, FileQ5_0, 32)
VOX_QUANTISED(q4_0, FileQ4_0, 32)
VOX_QUANTISED(q4_k, FileQ4_K, 256)
VOX_QUANTISED(q5_k, FileQ5_K, 256)
VOX_QUANTISED(q6_k, FileQ6_K, 256)
#undef VOX_QUANTISED
