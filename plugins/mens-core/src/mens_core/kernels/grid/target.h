// All that CUDA and Metal do not have in common. Everything else under kernels/grid is one text.
//
// A kernel is a grid of threads in groups of kGroup. Its buffers are numbered in the order of its
// parameters; the last one is its constants (args.h).
#pragma once

#if defined(VOX_METAL)

#include <metal_stdlib>
// Contraction is on unless a source says otherwise, whatever the compiler's options are; and the mode that keeps
// the written order is the source's to ask for too, whatever they are.
#pragma METAL fp math_mode(safe)
#pragma METAL fp contract(off)
#define CANON static inline __attribute__((always_inline))
#define VOX_FMA(a, b, c) metal::fma(a, b, c)
#define VOX_SQRT(a) metal::precise::sqrt(a)
#define VOX_CAST(To, a) as_type<To>(a)
#define VOX_DEVICE device
#define VOX_SHARED threadgroup
#define VOX_SHARED_POINTER threadgroup
#define VOX_BARRIER() metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup)
#define VOX_KERNEL(name) kernel void name
#define VOX_IN(type, name, number) device const type* name [[buffer(number)]]
#define VOX_OUT(type, name, number) device type* name [[buffer(number)]]
#define VOX_ARGS(type, number)                                                                              \
  constant type& args [[buffer(number)]], uint3 vox_thread [[thread_position_in_grid]],                     \
      uint3 vox_group [[threadgroup_position_in_grid]], uint3 vox_local [[thread_position_in_threadgroup]]
#define VOX_THREAD_X ((int64_t)vox_thread.x)
#define VOX_THREAD_Y ((int64_t)vox_thread.y)
#define VOX_GROUP_X ((int64_t)vox_group.x)
#define VOX_GROUP_Y ((int64_t)vox_group.y)
#define VOX_LOCAL ((int)vox_local.x)

#else  // CUDA

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <stdint.h>
#endif
#define CANON static __device__ __forceinline__
#define VOX_FMA(a, b, c) __fmaf_rn(a, b, c)
#define VOX_SQRT(a) __fsqrt_rn(a)
#define VOX_CAST(To, a) vox::bits_as(To(), a)
namespace vox {
CANON int32_t bits_as(int32_t, float a) { return __float_as_int(a); }
CANON float bits_as(float, int32_t a) { return __int_as_float(a); }
}  // namespace vox
#define VOX_DEVICE
#define VOX_SHARED __shared__
#define VOX_SHARED_POINTER
#define VOX_BARRIER() __syncthreads()
#define VOX_KERNEL(name) extern "C" __global__ void name
#define VOX_IN(type, name, number) const type* name
#define VOX_OUT(type, name, number) type* name
#define VOX_ARGS(type, number) const type args
#define VOX_THREAD_X ((int64_t)blockIdx.x * blockDim.x + threadIdx.x)
#define VOX_THREAD_Y ((int64_t)blockIdx.y * blockDim.y + threadIdx.y)
#define VOX_GROUP_X ((int64_t)blockIdx.x)
#define VOX_GROUP_Y ((int64_t)blockIdx.y)
#define VOX_LOCAL ((int)threadIdx.x)

#endif

#define VOX_ISA grid
