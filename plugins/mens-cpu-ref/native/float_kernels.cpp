// Compiled once per instruction set: everything in here lives in vox::<isa>.
#include "float_kernels.h"

#include "elementwise.h"

namespace vox {
namespace VOX_ISA {

const FloatKernels float_kernels = {
    add_part,
};

}  // namespace VOX_ISA
}  // namespace vox
