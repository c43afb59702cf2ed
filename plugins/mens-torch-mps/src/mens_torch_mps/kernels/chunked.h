// linear for few rows: the threads of a SIMD group share an output, each makes chunks of C128, and all
// fold them in order. A shuffle moves bits and does nothing else.

namespace vox {
namespace VOX_ISA {

// How many of `step` a piece has that starts at `first`.
CANON int32_t left_of(int32_t all, int32_t first, int32_t step) { return all - first < step ? all - first : step; }

}  // namespace VOX_ISA
}  // namespace vox

// `chunk` is an expression over the number c of a chunk and the `output`. A SIMD group takes every branch as one.
#define VOX_FOLD_CHUNKS(count, chunk)                                                   \
  const int32_t width = (int32_t)vox_simd_width;                                        \
  const int64_t output = VOX_GROUP_X * (kGroup / width) + (int64_t)vox_simd_group;      \
  if (output >= args.outputs) return;                                                   \
  const int32_t chunks = (int32_t)(count);                                              \
  float y = 0.0f;                                                                       \
  for (int32_t first = 0; first < chunks; first += width) {                             \
    const int32_t c = first + (int32_t)vox_simd_lane;                                   \
    float p = 0.0f;                                                                     \
    if (c < chunks) p = chunk;                                                          \
    for (int32_t i = 0; i < width && first + i < chunks; ++i)                           \
      y = chunk_folded(first + i == 0, y, metal::simd_shuffle(p, (uint16_t)i));         \
  }                                                                                     \
  if (vox_simd_lane != 0) return;                                                       \
  out[VOX_GROUP_Y * args.outputs + output] = y;                                         \
  VOX_WATCH(y, VOX_GROUP_Y);

#define VOX_CHUNKED_FLOAT(suffix, F)                                                                           \
  VOX_KERNEL(vox_chunked_##suffix)(VOX_IN(float, x, 0), VOX_IN(F::Stored, weight, 1), VOX_OUT(float, out, 2),  \
                                   VOX_OUT(int32_t, faults, 3), VOX_ARGS(LinearArgs, 4), VOX_SIMD) {           \
    VOX_FOLD_CHUNKS((args.columns - 1) / (int32_t)kChunk + 1,                                                  \
                    dot_of<F>(x + VOX_GROUP_Y * args.columns + c * (int32_t)kChunk,                            \
                              weight + output * args.columns + c * (int32_t)kChunk,                            \
                              left_of(args.columns, c * (int32_t)kChunk, (int32_t)kChunk)))                    \
  }
VOX_CHUNKED_FLOAT(f32, F32)
VOX_CHUNKED_FLOAT(f16, F16)
VOX_CHUNKED_FLOAT(bf16, Bf16)
#undef VOX_CHUNKED_FLOAT

// A chunk is `together` blocks of `size`: four of 32, or one of 256.
#define VOX_CHUNKED_BLOCKS(suffix, F, size, together)                                                           \
  VOX_KERNEL(vox_chunked_##suffix)(VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(uint8_t, weight, 2), \
                                   VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(LinearArgs, 5), \
                                   VOX_SIMD) {                                                                  \
    const int32_t blocks = args.columns / size;                                                                 \
    VOX_FOLD_CHUNKS((blocks - 1) / together + 1,                                                                \
                    dot_of_blocks##size<F>(weight + (output * blocks + c * together) * F::bytes,                \
                                           codes + VOX_GROUP_Y * args.columns + c * together * size,            \
                                           scales + VOX_GROUP_Y * blocks + c * together,                        \
                                           left_of(blocks, c * together, together)))                            \
  }
VOX_CHUNKED_BLOCKS(q8_0, FileQ8_0, 32, 4)
VOX_CHUNKED_BLOCKS(q5_0, FileQ5_0, 32, 4)
VOX_CHUNKED_BLOCKS(q4_0, FileQ4_0, 32, 4)
VOX_CHUNKED_BLOCKS(q4_k, FileQ4_K, 256, 1)
VOX_CHUNKED_BLOCKS(q5_k, FileQ5_K, 256, 1)
VOX_CHUNKED_BLOCKS(q6_k, FileQ6_K, 256, 1)
#undef VOX_CHUNKED_BLOCKS
