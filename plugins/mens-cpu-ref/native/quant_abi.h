// The C ABI of the quantised operators; conventions and error codes of abi.h.
//
// `format` numbers: 0 Q8_0, 1 Q5_0, 2 Q4_0, 3 Q4_K, 4 Q5_K, 5 Q6_K; for `vox_` alone also 6 and 7 (below). `columns` is a multiple of the
// format's block (32, or 256 for the K formats). File blocks are raw GGML blocks, row by row.
//
// A matrix is packed once and an activation buffer filled once per x; how either lies in memory is
// the implementation's own business, so never mix buffers of `vox_` and `ref_`.
#pragma once
#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

#define VOX_QUANT_OPERATORS(prefix)                                                                                  \
  /* Bytes of a packed matrix, of the file's blocks, of an activation buffer; -1: no such format, block or shape. */ \
  VOX_API int64_t prefix##_quant_packed_bytes(int32_t format, int64_t rows, int64_t columns);                        \
  VOX_API int64_t prefix##_quant_file_bytes(int32_t format, int64_t rows, int64_t columns);                          \
  VOX_API int64_t prefix##_quant_activation_bytes(int32_t block, int64_t rows, int64_t columns);                     \
  /* `packed` is 64-byte aligned and zeroed. Returns 1 + the first row with a scale that is not finite. */           \
  VOX_API int64_t prefix##_quant_pack(int32_t format, const uint8_t* file, int64_t rows, int64_t columns,            \
                                      uint8_t* packed);                                                              \
  /* x [rows][columns] to int8, for all weights with this block (32 or 256). */                                      \
  VOX_API int64_t prefix##_quant_activations(int32_t block, const float* x, int64_t rows, int64_t columns,           \
                                             uint8_t* activations);                                                  \
  /* y [rows][outputs] = x W^T. */                                                                                   \
  VOX_API int64_t prefix##_quant_linear(int32_t format, const uint8_t* packed, int64_t outputs, int64_t columns,     \
                                        const uint8_t* activations, int64_t rows, float* y);                         \
  /* out [count][columns] = rows `ids` of W [rows][columns] in float32, times scale (1: as they are). */             \
  VOX_API int64_t prefix##_quant_rows(int32_t format, const uint8_t* packed, int64_t rows, int64_t columns,          \
                                      const int32_t* ids, int64_t count, float scale, float* out);

VOX_QUANT_OPERATORS(vox)
VOX_QUANT_OPERATORS(ref)
#undef VOX_QUANT_OPERATORS

/* Another packing of Q8_0, for a matrix of which the greatest output is wanted: it is packed twice, and the second
   lies behind the first. Every other `vox_quant_` function takes the number of the first. */
#define VOX_Q8_0_UPPER 6
#define VOX_Q8_0_LOWER 7

/* Bytes of working memory of `vox_quant_choose`; -1: no such shape. */
VOX_API int64_t vox_quant_choose_bytes(int64_t outputs, int64_t columns, int64_t rows);
/* ids [rows]: the greatest of x W^T, the lowest id among equals, for W packed in two halves; -1 for a row that
   can't be bounded (not finite, or above 2^60): ask for all its outputs. `memory` is 64-byte aligned. `searched` takes
   how many of the rows' groups of 16 outputs were computed: where it is most of them, all outputs are found sooner. */
VOX_API int64_t vox_quant_choose(const uint8_t* packed, int64_t outputs, int64_t columns, const float* x, int64_t rows,
                                 uint8_t* memory, int32_t* ids, int64_t* searched);

/* ids [rows]: the greatest of x W^T, the lowest id among equals, of all outputs, which are not kept. At most
   VOX_GREATEST_ROWS rows; where an output is not finite, the code says so and `ids` says nothing. */
#define VOX_GREATEST_ROWS 16
VOX_API int64_t vox_quant_greatest(int32_t format, const uint8_t* packed, int64_t outputs, int64_t columns,
                                   const uint8_t* activations, int64_t rows, int32_t* ids);

#ifdef __cplusplus
}
#endif
