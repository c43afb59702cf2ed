// The C ABI of libvox_cpu. Plain pointers and numbers, row-major f32, no allocation that a
// caller must free, no exception, no global state but the thread pool and the chosen ISA.
//
// Every operator returns 0, or 1 + the index of the first row whose output is not finite, or
// -1 when memory or a thread could not be had. `ref_<op>` is the scalar reference with the
// signature of `vox_<op>`; it defines the bits.
#pragma once
#include <stdint.h>

#define VOX_ABI_VERSION 1
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
// "avx2", "avx512" or "neon"; "" where this machine is below x86-64-v3: no operator may be called.
VOX_API const char* vox_isa(void);
// Choose an instruction set for tests; "" goes back to the best. -1: not on this machine.
VOX_API int vox_force_isa(const char* name);
VOX_API int vox_set_threads(int count);
VOX_API int vox_threads(void);
// How long an idle pool thread spins before it sleeps.
VOX_API void vox_set_spin_us(int64_t microseconds);

// --- operators -----------------------------------------------------------------------------
#define VOX_OPERATORS(prefix)                                                                        \
  VOX_API int64_t prefix##_add(const float* a, const float* b, int64_t rows, int64_t width, float* out);

VOX_OPERATORS(vox)
VOX_OPERATORS(ref)
#undef VOX_OPERATORS

#ifdef __cplusplus
}
#endif
