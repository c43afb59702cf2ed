// The table of quantised kernels; one instance per instruction set, filled in quant_kernels.cpp.
#pragma once
#include "dispatch.h"
#include "pool.h"

namespace vox {

struct QuantKernels {
  Part linear;
  Part activations;
  Part choose_prepare, choose_bound, choose_floor, choose_search;
  Part greatest;
  Part gated;
};

#if defined(VOX_HAS_AVX2) || defined(VOX_ISA_AVX2)
namespace avx2 { extern const QuantKernels quant_kernels; }
#endif
#if defined(VOX_HAS_AVX512) || defined(VOX_ISA_AVX512)
namespace avx512 { extern const QuantKernels quant_kernels; }
#endif
#if defined(VOX_HAS_NEON) || defined(VOX_ISA_NEON)
namespace neon { extern const QuantKernels quant_kernels; }
#endif
#if defined(VOX_HAS_NEON_DOT) || defined(VOX_ISA_NEON_DOT)
namespace neon_dot { extern const QuantKernels quant_kernels; }
#endif

}  // namespace vox
