// Compiled once per instruction set: everything in here lives in vox::<isa>.
#include "quant_kernels.h"

#include "quant_activations.h"
#include "quant_choose.h"
#include "quant_gated.h"
#include "quant_linear.h"

namespace vox {
namespace VOX_ISA {

const QuantKernels quant_kernels = {
    quant_linear_part,
    quantise_part,
    choose_prepare_part,
    choose_bound_part,
    choose_floor_part,
    choose_search_part,
    greatest_part,
    quant_gated_part,
};

}  // namespace VOX_ISA
}  // namespace vox
