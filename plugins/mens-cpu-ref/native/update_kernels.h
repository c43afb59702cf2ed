// The table of kernels of loss, parameter gradients and update; one instance per instruction set.
#pragma once
#include "dispatch.h"
#include "pool.h"

namespace vox {

struct UpdateKernels {
  Part linear_backward;
  int64_t (*linear_backward_scratch_bytes)(int64_t rows_per_part);
  int64_t backward_width;  // columns of a part of `linear_backward`
  Part example_products;
  int64_t (*example_products_scratch_bytes)();
  Part embed_backward;
  Part cross_entropy, example_sums;
  Part scale, add_scaled, dropout;
  Part sum_of_squares, adamw;
};

#if defined(VOX_HAS_AVX2) || defined(VOX_ISA_AVX2)
namespace avx2 { extern const UpdateKernels update_kernels; }
#endif
#if defined(VOX_HAS_AVX512) || defined(VOX_ISA_AVX512)
namespace avx512 { extern const UpdateKernels update_kernels; }
#endif
#if defined(VOX_HAS_NEON) || defined(VOX_ISA_NEON)
namespace neon { extern const UpdateKernels update_kernels; }
#endif

}  // namespace vox
