// Compiled once per instruction set: everything in here lives in vox::<isa>.
#include "backward_kernels.h"

#include "attention_backward.h"
#include "gates_backward.h"
#include "norm_backward.h"
#include "rope_backward.h"

namespace vox {
namespace VOX_ISA {

const BackwardKernels backward_kernels = {
    norm_backward_part,      rope_backward_part,
    silu_gate_backward_part, gelu_gate_backward_part, softcap_backward_part,
    transpose_part,          queries_part,            keys_part,             finish_keys_part,
    attention_backward_scratch_bytes,
};

}  // namespace VOX_ISA
}  // namespace vox
