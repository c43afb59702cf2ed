// The quantised kernels of the instruction set in use.
#pragma once
#include "quant_kernels.h"

namespace vox {

const QuantKernels& quant_kernels_in_use();

}  // namespace vox
