// linear for many rows by the GPU's own matrices of 8 x 8. Nobody promises in which order they add: these kernels run
// only where a probe found the chain of docs/numerics.md, section 5 (mens_torch_mps.matrices).

namespace vox {
namespace VOX_ISA {

enum {
  kMatrix = 8,          // a side
  kMatrixTile = 32,     // rows, and outputs, of a group; a SIMD group has a quarter
  kMatrixTerms = 32,    // of a chunk that a group reads at once
  kMatrixValues = 1024  // of a tile
};

}  // namespace VOX_ISA
}  // namespace vox

// out = a b + c, 64 numbers each, for every SIMD group.
VOX_KERNEL(vox_matrix_probe)(VOX_IN(float, a, 0), VOX_IN(float, b, 1), VOX_IN(float, c, 2), VOX_OUT(float, out, 3),
                             VOX_ARGS(RowArgs, 4), VOX_SIMD) {
  const int64_t at = VOX_GROUP_X * (kGroup / (int32_t)vox_simd_width) + (int64_t)vox_simd_group;
  if (at >= args.width) return;
  metal::simdgroup_float8x8 left, right, sum;
  metal::simdgroup_load(left, a + at * kMatrix * kMatrix, kMatrix);
  metal::simdgroup_load(right, b + at * kMatrix * kMatrix, kMatrix);
  metal::simdgroup_load(sum, c + at * kMatrix * kMatrix, kMatrix);
  metal::simdgroup_multiply_accumulate(sum, left, right, sum);
  metal::simdgroup_store(sum, out + at * kMatrix * kMatrix, kMatrix);
}

// args.terms is a multiple of kMatrix. A chunk's sums begin at +0 and go on through its pieces; then they are folded.
#define VOX_MATRICES(suffix, F)                                                                                      \
  VOX_KERNEL(vox_matrices_##suffix)(VOX_IN(float, x, 0), VOX_IN(F::Stored, weight, 1), VOX_OUT(float, out, 2),       \
                                    VOX_OUT(int32_t, faults, 3), VOX_ARGS(TallArgs, 4), VOX_SIMD) {                  \
    VOX_SHARED float left[kMatrixValues];                                                                            \
    VOX_SHARED float right[kMatrixValues];                                                                           \
    VOX_SHARED float sums[kMatrixValues];                                                                            \
    const int64_t row = VOX_GROUP_Y * kMatrixTile, column = VOX_GROUP_X * kMatrixTile;                               \
    const int32_t down = (int32_t)vox_simd_group / 2 * 2 * kMatrix;                                                  \
    const int32_t over = (int32_t)vox_simd_group % 2 * 2 * kMatrix;                                                  \
    float y[kMatrix];                                                                                                \
    for (int i = 0; i < kMatrix; ++i) y[i] = 0.0f;                                                                   \
    for (int32_t chunk = 0; chunk < args.terms; chunk += (int32_t)kChunk) {                                          \
      const int32_t end = args.terms - chunk < (int32_t)kChunk ? args.terms : chunk + (int32_t)kChunk;               \
      metal::simdgroup_float8x8 p00 = metal::make_filled_simdgroup_matrix<float, kMatrix, kMatrix>(0.0f);            \
      metal::simdgroup_float8x8 p01 = p00, p10 = p00, p11 = p00;                                                     \
      for (int32_t k = chunk; k < end; k += kMatrixTerms) {                                                          \
        const int32_t count = end - k < kMatrixTerms ? end - k : (int32_t)kMatrixTerms;                              \
        VOX_BARRIER();                                                                                               \
        for (int32_t i = VOX_LOCAL; i < kMatrixValues; i += kGroup) {                                                \
          const int64_t far = i / kMatrixTerms, term = i % kMatrixTerms;                                             \
          const bool is_row = row + far < args.rows && term < count;                                                 \
          const bool is_column = column + far < args.columns && term < count;                                        \
          left[i] = is_row ? x[(row + far) * args.terms + k + term] : 0.0f;                                          \
          right[term * kMatrixTile + far] =                                                                          \
              is_column ? F::widened(weight[(column + far) * args.terms + k + term]) : 0.0f;                         \
        }                                                                                                            \
        VOX_BARRIER();                                                                                               \
        for (int32_t t = 0; t < count; t += kMatrix) {                                                               \
          metal::simdgroup_float8x8 a0, a1, b0, b1;                                                                  \
          metal::simdgroup_load(a0, left + (down * kMatrixTerms + t), kMatrixTerms);                                 \
          metal::simdgroup_load(a1, left + ((down + kMatrix) * kMatrixTerms + t), kMatrixTerms);                     \
          metal::simdgroup_load(b0, right + (t * kMatrixTile + over), kMatrixTile);                                  \
          metal::simdgroup_load(b1, right + (t * kMatrixTile + over + kMatrix), kMatrixTile);                        \
          metal::simdgroup_multiply_accumulate(p00, a0, b0, p00);                                                    \
          metal::simdgroup_multiply_accumulate(p01, a0, b1, p01);                                                    \
          metal::simdgroup_multiply_accumulate(p10, a1, b0, p10);                                                    \
          metal::simdgroup_multiply_accumulate(p11, a1, b1, p11);                                                    \
        }                                                                                                            \
      }                                                                                                              \
      metal::simdgroup_store(p00, sums + (down * kMatrixTile + over), kMatrixTile);                                  \
      metal::simdgroup_store(p01, sums + (down * kMatrixTile + over + kMatrix), kMatrixTile);                        \
      metal::simdgroup_store(p10, sums + ((down + kMatrix) * kMatrixTile + over), kMatrixTile);                      \
      metal::simdgroup_store(p11, sums + ((down + kMatrix) * kMatrixTile + over + kMatrix), kMatrixTile);            \
      VOX_BARRIER();  /* the sums of a chunk are there */                                                            \
      for (int i = 0; i < kMatrix; ++i) y[i] = chunk_folded(chunk == 0, y[i], sums[VOX_LOCAL * kMatrix + i]);        \
    }                                                                                                                \
    const int64_t mine = row + VOX_LOCAL * kMatrix / kMatrixTile;                                                    \
    for (int i = 0; i < kMatrix; ++i) {                                                                              \
      const int64_t output = column + VOX_LOCAL * kMatrix % kMatrixTile + i;                                         \
      if (mine >= args.rows || output >= args.columns) continue;                                                     \
      out[mine * args.columns + output] = y[i];                                                                      \
      VOX_WATCH(y[i], mine);                                                                                         \
    }                                                                                                                \
  }
VOX_MATRICES(f32, F32)
VOX_MATRICES(f16, F16)
VOX_MATRICES(bf16, Bf16)
#undef VOX_MATRICES
