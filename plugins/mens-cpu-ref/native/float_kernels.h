// The table of float kernels; one instance per instruction set, filled in float_kernels.cpp.
#pragma once
#include "dispatch.h"
#include "pool.h"
#include "tasks.h"

namespace vox {

struct FloatKernels {
  Part add, silu_gate, gelu_gate, softcap;
  Part pack, widen, embed, linear;
  Part compact_measure, compact_pack;
  int64_t (*linear_scratch_bytes)(int64_t rows_per_part);
  int64_t group_panels;  // of a part of `linear`
  Part norm, rope, rotary;
  Part kv_append, attention;
  int64_t (*attention_scratch_bytes)(const KvLayer& layer);
  Part argmax, row_max, token_weights, log_normaliser, penalise;
  Part functions[5];  // exp, log, silu, gelu, tanh, for tests
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
