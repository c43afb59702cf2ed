// Compiled once per instruction set: everything in here lives in vox::<isa>.
#include "float_kernels.h"

#include "attention.h"
#include "choose.h"
#include "gates.h"
#include "matmul_float.h"
#include "norm.h"
#include "pack_compact.h"
#include "rope.h"
#include "rotary.h"

namespace vox {
namespace VOX_ISA {

const FloatKernels float_kernels = {
    add_part,      silu_gate_part, gelu_gate_part, softcap_part,
    pack_part,     widen_part,     embed_part,     linear_part,
    compact_measure_part, compact_pack_part,
    linear_scratch_bytes, kGroupPanels,
    norm_part,     rope_part,      rotary_part,
    kv_append_part, attention_part, attention_scratch_bytes,
    argmax_part,   row_max_part,   token_weights_part, log_normaliser_part, penalise_part,
    {exp_part, log_part, silu_part, gelu_part, tanh_part},
};

}  // namespace VOX_ISA
}  // namespace vox
