// The C ABI of the quantised operators; same conventions as abi.h.
//
// `format` numbers: 0 Q8_0, 1 Q5_0, 2 Q4_0, 3 Q4_K, 4 Q5_K, 5 Q6_K. `columns` is a multiple of the
// format's block (32, or 256 for the K formats). File blocks are raw GGML blocks, row by row.
#pragma once
#include "abi.h"

#ifdef __cplusplus
extern "C" {
#endif

// Bytes of a packed matrix, or of the buffer for quantised activations; -1 where the format, the block
// or the shape is not possible.
VOX_API int64_t vox_quant_packed_bytes(int32_t format, int64_t rows, int64_t columns);
VOX_API int64_t vox_quant_file_bytes(int32_t format, int64_t rows, int64_t columns);
VOX_API int64_t vox_quant_activation_bytes(int32_t block, int64_t rows, int64_t columns);

// Packs file blocks; `packed` is 64-byte aligned and zeroed. Returns 1 + the first row with a scale
// that is not finite.
VOX_API int64_t vox_quant_pack(int32_t format, const uint8_t* file, int64_t rows, int64_t columns, uint8_t* packed);

// Quantises x [rows][columns] for weights with this block (32 or 256).
VOX_API int64_t vox_quant_activations(int32_t block, const float* x, int64_t rows, int64_t columns, uint8_t* activations);

// y [rows][outputs] = x W^T.
VOX_API int64_t vox_quant_linear(int32_t format, const uint8_t* packed, int64_t outputs, int64_t columns,
                                 const uint8_t* activations, int64_t rows, float* y);

// out [count][columns] = the rows `ids` of a packed matrix in float32, times *scale unless it is null.
VOX_API int64_t vox_quant_rows(int32_t format, const uint8_t* packed, int64_t columns, const int32_t* ids,
                               int64_t count, const float* scale, float* out);

// The scalar reference, on file blocks. `ref_quant_linear` quantises x itself; codes [rows][columns]
// and scales [rows][columns / block] are those of `ref_quant_activations`.
VOX_API int64_t ref_quant_activations(int32_t block, const float* x, int64_t rows, int64_t columns, int8_t* codes,
                                      float* scales);
VOX_API int64_t ref_quant_linear(int32_t format, const uint8_t* file, int64_t outputs, int64_t columns, const float* x,
                                 int64_t rows, float* y);
VOX_API int64_t ref_quant_rows(int32_t format, const uint8_t* file, int64_t columns, const int32_t* ids, int64_t count,
                               const float* scale, float* out);

#ifdef __cplusplus
}
#endif
