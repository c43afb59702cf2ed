// The C ABI of the backward operators (docs/numerics.md, section 12); conventions and error codes of abi.h.
//
// `dy` is the gradient of the loss with respect to an operator's output, `d<name>` with respect to its
// argument of that name. An operator with several outputs returns 1 + the first row in which any of them
// is not finite.
#pragma once
#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define VOX_BACKWARD_OPERATORS(prefix)                                                                        \
  VOX_API int64_t prefix##_norm_backward(const float* dy, const float* x, const float* weight, int64_t rows,  \
                                         int64_t heads, int64_t width, float eps, float* dx);                 \
  VOX_API int64_t prefix##_rope_backward(const float* dy, int64_t rows, int64_t heads, int64_t pairs,         \
                                         const float* table, const int32_t* slots, int64_t slot_count,        \
                                         const int32_t* positions, float* dx);                                \
  VOX_API int64_t prefix##_silu_gate_backward(const float* dy, const float* gate, const float* up,            \
                                              int64_t rows, int64_t width, float* dgate, float* dup);         \
  VOX_API int64_t prefix##_gelu_gate_backward(const float* dy, const float* gate, const float* up,            \
                                              int64_t rows, int64_t width, float* dgate, float* dup);         \
  VOX_API int64_t prefix##_softcap_backward(const float* dy, const float* x, int64_t rows, int64_t width,     \
                                            float cap, float* dx);                                            \
  /* `attention`, which also tells m and l [rows][heads]. */                                                  \
  VOX_API int64_t prefix##_attention_saving(                                                                  \
      const float* q, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,                        \
      const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t sequences,        \
      int64_t blocks_per_sequence, int64_t blocks, const float* keys, const float* values, float scale,       \
      int64_t window, float softcap, float* out, float* m, float* l);                                         \
  /* Every sequence has all its rows, from position 0 on (else VOX_OUT_OF_RANGE). */                          \
  VOX_API int64_t prefix##_attention_backward(                                                                \
      const float* dy, const float* q, const float* out, const float* m, const float* l, int64_t rows,        \
      int64_t heads, int64_t kv_heads, int64_t head_dim, const int32_t* positions, const int32_t* starts,     \
      const int32_t* block_tables, int64_t sequences, int64_t blocks_per_sequence, int64_t blocks,            \
      const float* keys, const float* values, float scale, int64_t window, float softcap, float* dq,          \
      float* dk, float* dv);

VOX_BACKWARD_OPERATORS(vox)
VOX_BACKWARD_OPERATORS(ref)
#undef VOX_BACKWARD_OPERATORS

#ifdef __cplusplus
}
#endif
