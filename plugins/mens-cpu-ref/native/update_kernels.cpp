// Compiled once per instruction set: everything in here lives in vox::<isa>.
#include "update_kernels.h"

#include "cross_entropy.h"
#include "dropout.h"
#include "linear_backward.h"
#include "optimizer.h"
#include "products.h"

namespace vox {
namespace VOX_ISA {

const UpdateKernels update_kernels = {
    linear_backward_part, linear_backward_scratch_bytes, kBackwardWidth,
    example_products_part, example_products_scratch_bytes,
    embed_backward_part,
    cross_entropy_part, example_sums_part,
    scale_part, add_scaled_part, dropout_part,
    sum_of_squares_part, adamw_part,
};

}  // namespace VOX_ISA
}  // namespace vox
