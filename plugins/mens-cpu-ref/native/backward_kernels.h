// The table of backward kernels; one instance per instruction set, filled in backward_kernels.cpp.
#pragma once
#include "backward_tasks.h"
#include "dispatch.h"
#include "pool.h"

namespace vox {

struct BackwardKernels {
  Part norm, rope;
  Part silu_gate, gelu_gate, softcap;
  Part transpose, queries, keys, finish_keys;  // of attention
  int64_t (*attention_scratch_bytes)(const KvLayer& layer);
};

#if defined(VOX_HAS_AVX2) || defined(VOX_ISA_AVX2)
namespace avx2 { extern const BackwardKernels backward_kernels; }
#endif
#if defined(VOX_HAS_AVX512) || defined(VOX_ISA_AVX512)
namespace avx512 { extern const BackwardKernels backward_kernels; }
#endif
#if defined(VOX_HAS_NEON) || defined(VOX_ISA_NEON)
namespace neon { extern const BackwardKernels backward_kernels; }
#endif

}  // namespace vox
