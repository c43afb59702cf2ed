// What the grid kernels use of CUDA's language, as C++. Correctly rounded or moving bits, like metal_stdlib.
#pragma once
#include <string.h>

#include "runner.h"

#define __device__
#define __global__
#define __forceinline__ inline

struct CudaIndex {
  unsigned x, y, z;
};
#define threadIdx (CudaIndex{vox_shim::current().local, 0, 0})
#define blockIdx (CudaIndex{vox_shim::current().group_x, vox_shim::current().group_y, 0})
#define blockDim (CudaIndex{vox_shim::kGroup, 1, 1})

inline void __syncthreads() { vox_shim::barrier(); }
inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
inline int __float_as_int(float a) {
  int bits;
  memcpy(&bits, &a, 4);
  return bits;
}
inline float __int_as_float(int bits) {
  float a;
  memcpy(&a, &bits, 4);
  return a;
}
