// The C ABI of loss, gradients of parameters and update (docs/numerics.md, "Loss, gradients of
// parameters, update"); conventions and error codes of abi.h.
//
// Examples own contiguous rows: starts[examples + 1], ascending from 0 to the number of rows.
// A fault of a per-example output is 1 + the example.
#pragma once
#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define VOX_UPDATE_OPERATORS(prefix)                                                                               \
  /* out [rows][inputs] = dy [rows][outputs] W. `packed` is what `pack` or `quant_pack` made. */                   \
  VOX_API int64_t prefix##_linear_backward(int32_t format, const void* packed, int64_t outputs, int64_t inputs,    \
                                           const float* dy, int64_t rows, float* out);                             \
  VOX_API int64_t prefix##_quant_linear_backward(int32_t format, const void* packed, int64_t outputs,              \
                                                 int64_t inputs, const float* dy, int64_t rows, float* out);       \
  /* out [examples][table_rows][width], zeroed by the caller. */                                                   \
  VOX_API int64_t prefix##_embed_backward(const float* dy, const int32_t* token_ids, const int32_t* starts,        \
                                          int64_t examples, int64_t table_rows, int64_t width, float* out);        \
  /* out [examples][a_width][b_width] = a^T b over each example's rows. */                                         \
  VOX_API int64_t prefix##_example_products(const float* a, const float* b, const int32_t* starts,                 \
                                            int64_t examples, int64_t a_width, int64_t b_width, float* out);       \
  VOX_API int64_t prefix##_cross_entropy(const float* logits, const int32_t* targets, int64_t rows, int64_t width, \
                                         float* losses, float* gradients);                                         \
  /* positions ascend within an example. */                                                                        \
  VOX_API int64_t prefix##_example_sums(const float* losses, const int32_t* positions, const int32_t* starts,      \
                                        int64_t examples, float* out);                                             \
  VOX_API int64_t prefix##_scale(const float* x, int64_t rows, int64_t width, float factor, float* out);           \
  VOX_API int64_t prefix##_add_scaled(const float* y, const float* x, int64_t rows, int64_t width, float factor,   \
                                      float* out);                                                                 \
  /* width at most 2^18, examples below 2^16, layer below 2^16. */                                                 \
  VOX_API int64_t prefix##_dropout(const float* x, const int32_t* positions, const int32_t* examples,              \
                                   int64_t rows, int64_t width, uint64_t seed, uint32_t step, uint32_t layer,      \
                                   uint32_t threshold, float factor, float* out);                                  \
  VOX_API int64_t prefix##_sum_of_squares(const float* x, int64_t elements, float* out);                           \
  /* `constants`: the nine of mens_core.training_ops.AdamW, in its order. */                                       \
  VOX_API int64_t prefix##_adamw(float* parameter, const float* gradient, float* m, float* v, int64_t rows,        \
                                 int64_t width, const float* constants);

VOX_UPDATE_OPERATORS(vox)
VOX_UPDATE_OPERATORS(ref)
#undef VOX_UPDATE_OPERATORS

#ifdef __cplusplus
}
#endif
