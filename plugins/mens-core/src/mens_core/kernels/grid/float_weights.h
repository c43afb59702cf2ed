// Float weights [outputs, columns], row by row as in the checkpoint: widening, embedding, linear.
#pragma once
#include "elementwise.h"

namespace vox {
namespace VOX_ISA {

struct F32 {
  typedef float Stored;
  CANON float widened(float w) { return w; }
};
struct F16 {
  typedef uint16_t Stored;
  CANON float widened(uint16_t w) { return f16_to_f32(w); }
};
struct Bf16 {
  typedef uint16_t Stored;
  CANON float widened(uint16_t w) { return bf16_to_f32(w); }
};

template <class F>
CANON float loaded(VOX_DEVICE const typename F::Stored* source, int64_t i, int32_t add_one, float one) {
  const float w = F::widened(source[i]);
  return add_one != 0 ? f_add(w, F_CONST(float, 0x3F800000u)) : f_mul(w, one);
}

template <class F>
CANON float dot_of(VOX_DEVICE const float* x, VOX_DEVICE const typename F::Stored* weight, int32_t columns) {
  float y = 0.0f;
  for (int32_t first = 0; first < columns; first += (int32_t)kChunk) {
    const int32_t end = first + (int32_t)kChunk < columns ? first + (int32_t)kChunk : columns;
    float p = 0.0f;
    for (int32_t k = first; k < end; ++k) p = f_fma(x[k], F::widened(weight[k]), p);
    y = chunk_folded(first == 0, y, p);
  }
  return y;
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_FLOAT_WEIGHTS(suffix, F)                                                                              \
  VOX_KERNEL(vox_widen_##suffix)(VOX_IN(F::Stored, source, 0), VOX_OUT(float, out, 1), VOX_ARGS(WidenArgs, 2)) {  \
    const int64_t i = VOX_THREAD_X;                                                                               \
    if (i < args.elements) out[i] = loaded<F>(source, i, args.add_one, args.one);                                 \
  }                                                                                                               \
  VOX_KERNEL(vox_embed_##suffix)(VOX_IN(F::Stored, table, 0), VOX_IN(int32_t, ids, 1), VOX_OUT(float, out, 2),    \
                                 VOX_OUT(int32_t, faults, 3), VOX_ARGS(EmbedArgs, 4)) {                           \
    if (VOX_THREAD_X >= args.columns) return;                                                                     \
    const float w = F::widened(table[(int64_t)ids[VOX_THREAD_Y] * args.columns + VOX_THREAD_X]);                  \
    const float y = f_mul(w, args.scale);                                                                         \
    out[VOX_THREAD_Y * args.columns + VOX_THREAD_X] = y;                                                          \
    VOX_WATCH(y, VOX_THREAD_Y);                                                                                   \
  }                                                                                                               \
  VOX_KERNEL(vox_linear_##suffix)(VOX_IN(float, x, 0), VOX_IN(F::Stored, weight, 1), VOX_OUT(float, out, 2),      \
                                  VOX_OUT(int32_t, faults, 3), VOX_ARGS(LinearArgs, 4)) {                         \
    if (VOX_THREAD_X >= args.outputs) return;                                                                     \
    const float y =                                                                                               \
        dot_of<F>(x + VOX_THREAD_Y * args.columns, weight + VOX_THREAD_X * args.columns, args.columns);           \
    out[VOX_THREAD_Y * args.outputs + VOX_THREAD_X] = y;                                                          \
    VOX_WATCH(y, VOX_THREAD_Y);                                                                                   \
  }
VOX_FLOAT_WEIGHTS(f32, F32)
VOX_FLOAT_WEIGHTS(f16, F16)
VOX_FLOAT_WEIGHTS(bf16, Bf16)
#undef VOX_FLOAT_WEIGHTS
