// The C ABI of libvox_cpu. Plain pointers and numbers, row-major f32, no allocation that a
// caller must free, no exception, no global state but the thread pool and the chosen ISA.
//
// Every operator returns 0, or 1 + the index of the first row whose output is not finite, or one
// of the negative codes below. `ref_<op>` is the scalar reference with the signature of `vox_<op>`;
// it defines the bits.
#pragma once
#include <stdint.h>

#define VOX_ABI_VERSION 7
#if defined(__GNUC__)
#define VOX_API __attribute__((visibility("default")))
#else
#define VOX_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// --- the library ---------------------------------------------------------------------------
VOX_API int vox_abi_version(void);
// "avx2", "avx512", "neon" or "neon_dot"; "" where this machine is below x86-64-v3: no operator may be called.
VOX_API const char* vox_isa(void);
// Choose an instruction set for tests; "" goes back to the best. -1: not on this machine.
VOX_API int vox_force_isa(const char* name);
VOX_API int vox_set_threads(int count);
VOX_API int vox_threads(void);
// How long an idle pool thread spins before it sleeps.
VOX_API void vox_set_spin_us(int64_t microseconds);

// --- operators -----------------------------------------------------------------------------
// -1: no memory or thread to be had. -2: a token id, position or block number out of range;
// nothing was written.
#define VOX_OUT_OF_MEMORY (-1)
#define VOX_OUT_OF_RANGE (-2)

// Formats of float weights: 0 f32, 1 f16, 2 bf16. A packed weight has the bytes of its elements
// with the number of outputs rounded up to 16; only functions of one prefix can read it;
// `pack` returns 1 + the first output with a weight that is not finite.
// Rows of a step: positions[rows], starts[sequences + 1], block_tables[sequences][blocks_per_sequence].
// Rotary table: [slot][128 positions][2][pairs]; slots[block] is the slot of a block of positions, or -1.
// KV cache of one layer: keys [blocks][kv_heads][head_dim][128], values [blocks][kv_heads][128][value_stride],
// value_stride being head_dim rounded up to 16.
#define VOX_OPERATORS(prefix)                                                                                 \
  VOX_API int64_t prefix##_pack(int32_t format, const void* source, int64_t outputs, int64_t inputs,          \
                                void* packed);                                                                \
  VOX_API int64_t prefix##_widen(int32_t format, const void* source, int64_t elements, int32_t add_one,       \
                                 float* out);                                                                 \
  VOX_API int64_t prefix##_embed(int32_t format, const void* packed, int64_t outputs, int64_t inputs,         \
                                 const int32_t* token_ids, int64_t rows, float scale, float* out);            \
  VOX_API int64_t prefix##_linear(int32_t format, const void* packed, int64_t outputs, int64_t inputs,        \
                                  const float* x, int64_t rows, float* out);                                  \
  VOX_API int64_t prefix##_norm(const float* x, const float* weight, int64_t rows, int64_t heads,             \
                                int64_t width, float eps, float* out);                                        \
  VOX_API int64_t prefix##_rotary(const uint64_t* frequencies, int64_t pairs, uint64_t factor_low,            \
                                  uint64_t factor_high, int64_t first_position, int64_t positions,            \
                                  float* table);                                                              \
  VOX_API int64_t prefix##_rope(const float* x, int64_t rows, int64_t heads, int64_t pairs,                   \
                                const float* table, const int32_t* slots, int64_t slot_count,                 \
                                const int32_t* positions, float* out);                                        \
  VOX_API int64_t prefix##_kv_append(const float* k, const float* v, int64_t rows, int64_t kv_heads,          \
                                     int64_t head_dim, const int32_t* positions, const int32_t* starts,       \
                                     const int32_t* block_tables, int64_t sequences,                          \
                                     int64_t blocks_per_sequence, int64_t blocks, float* keys, float* values); \
  VOX_API int64_t prefix##_attention(const float* q, int64_t rows, int64_t heads, int64_t kv_heads,           \
                                     int64_t head_dim, const int32_t* positions, const int32_t* starts,       \
                                     const int32_t* block_tables, int64_t sequences,                          \
                                     int64_t blocks_per_sequence, int64_t blocks, const float* keys,          \
                                     const float* values, float scale, int64_t window, float softcap,         \
                                     float* out);                                                             \
  VOX_API int64_t prefix##_add(const float* a, const float* b, int64_t rows, int64_t width, float* out);      \
  VOX_API int64_t prefix##_silu_gate(const float* gate, const float* up, int64_t rows, int64_t width,         \
                                     float* out);                                                             \
  VOX_API int64_t prefix##_gelu_gate(const float* gate, const float* up, int64_t rows, int64_t width,         \
                                     float* out);                                                             \
  VOX_API int64_t prefix##_softcap(const float* x, int64_t rows, int64_t width, float cap, float* out);       \
  VOX_API int64_t prefix##_penalise(float* logits, int64_t width, const int32_t* token_ids, int64_t count,    \
                                    const float* repetition, const float* subtract);                          \
  VOX_API int64_t prefix##_argmax(const float* x, int64_t rows, int64_t width, int32_t* out);                 \
  VOX_API int64_t prefix##_token_weights(const float* x, int64_t width, float temperature, uint64_t* out);    \
  VOX_API int64_t prefix##_log_normaliser(const float* x, int64_t rows, int64_t width, float* out);           \
  /* Elementary functions, for tests: 0 exp, 1 log, 2 silu, 3 gelu, 4 tanh. */                                \
  VOX_API int64_t prefix##_function(int32_t which, const float* x, int64_t elements, float* out);

VOX_OPERATORS(vox)
VOX_OPERATORS(ref)

// A bf16 weight in twelve bits each (compact_layout.h), for `vox_embed`, `vox_linear`, `vox_linear_backward` and a
// recording, as format VOX_BF16_COMPACT: the same values. The reference has none, so it stays what others are held to.
#define VOX_BF16_COMPACT 3
// What each of the panels of 16 outputs needs: tables [panels][16] bytes, kept [panels] columns that are kept whole.
// Returns 1 + the first output with a weight that is not finite.
VOX_API int64_t vox_compact_measure(const void* source, int64_t outputs, int64_t inputs, uint8_t* tables,
                                    int64_t* kept);
// Bytes of a packed weight with so many kept columns; it begins at a cache line.
VOX_API int64_t vox_compact_bytes(int64_t outputs, int64_t inputs, int64_t kept);
// firsts [panels]: kept columns of the panels before each one.
VOX_API int64_t vox_compact_pack(const void* source, int64_t outputs, int64_t inputs, const uint8_t* tables,
                                 const int64_t* firsts, void* packed);

// Reads whole MiB of `bytes` of memory once, with all threads, for measurements; `folded` is the xor of its words.
VOX_API int64_t vox_read(const void* memory, int64_t bytes, uint64_t* folded);

// --- several operators in one call -----------------------------------------------------------
// A recording is rows of VOX_OPERATION_WORDS numbers: kind, whether the operator is independent of the one before
// it (1: both may run at once), the buffers x, y and out (indices into `buffers`, the addresses of this step; -1:
// none), then arguments in the order of the operator's own, floats as their bits. All operators get the same rows
// of a step. Returns what the first operator that objects returns, nothing having run; VOX_OUT_OF_MEMORY; or 1 + the
// index of the first operator with a row that is not finite.
#define VOX_OPERATION_WORDS 16
enum {
  VOX_NORM = 0,               // x out: weight heads width eps
  VOX_ROPE = 1,               // x out: heads pairs table slots slot_count
  VOX_KV_APPEND = 2,          // x=k y=v: kv_heads head_dim keys values
  VOX_ATTENTION = 3,          // x=q out: heads kv_heads head_dim keys values scale window softcap
  VOX_ADD = 4,                // x y out: width
  VOX_SILU_GATE = 5,          // x y out: width
  VOX_GELU_GATE = 6,          // x y out: width
  VOX_LINEAR = 7,             // x out: format packed outputs inputs
  VOX_QUANT_ACTIVATIONS = 8,  // x out=bytes: block columns
  VOX_QUANT_LINEAR = 9,       // x=bytes out: format packed outputs columns
  VOX_ADD_SCALED = 10,        // x y out: width factor; out = x + y * factor
};
VOX_API int64_t vox_replay(const int64_t* operations, int64_t count, const int64_t* buffers, int64_t rows,
                           const int32_t* positions, const int32_t* starts, const int32_t* block_tables,
                           int64_t sequences, int64_t blocks_per_sequence, int64_t blocks);
#undef VOX_OPERATORS

#ifdef __cplusplus
}
#endif
