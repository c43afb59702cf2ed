// The table of float kernels; one instance per instruction set, filled in float_kernels.cpp.
#pragma once
#include "dispatch.h"
#include "pool.h"

namespace vox {

struct FloatKernels {
  Part add;
};

#if defined(VOX_HAS_AVX2) || defined(VOX_ISA_AVX2)
namespace avx2 { extern const FloatKernels float_kernels; }
#endif
#if defined(VOX_HAS_AVX512) || defined(VOX_ISA_AVX512)
namespace avx512 { extern const FloatKernels float_kernels; }
#endif
#if defined(VOX_HAS_NEON) || defined(VOX_ISA_NEON)
namespace neon { extern const FloatKernels float_kernels; }
#endif

}  // namespace vox
