// Sums, gated activations and softcap.
#pragma once
#include "elementwise.h"

namespace vox {
namespace VOX_ISA {

static int64_t add_part(const void* task, int64_t begin, int64_t end, void*) {
  return elementwise(*static_cast<const ElementwiseTask*>(task), begin, end,
                     [](VF a, VF b) { return f_add(a, b); });
}

static int64_t silu_gate_part(const void* task, int64_t begin, int64_t end, void*) {
  return elementwise(*static_cast<const ElementwiseTask*>(task), begin, end,
                     [](VF gate, VF up) { return silu_gated(gate, up); });
}

static int64_t gelu_gate_part(const void* task, int64_t begin, int64_t end, void*) {
  return elementwise(*static_cast<const ElementwiseTask*>(task), begin, end,
                     [](VF gate, VF up) { return gelu_gated(gate, up); });
}

static int64_t softcap_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& softcap = *static_cast<const ElementwiseTask*>(task);
  const VF cap = f_splat(softcap.constant);
  return elementwise(softcap, begin, end, [cap](VF x, VF) { return f_softcap(x, cap); });
}

// The elementary functions on their own, for tests.
#define VOX_FUNCTION_PART(name, function)                                                              \
  static int64_t name(const void* task, int64_t begin, int64_t end, void*) {                           \
    return elementwise(*static_cast<const ElementwiseTask*>(task), begin, end,                         \
                       [](VF x, VF) { return function(x); });                                          \
  }
VOX_FUNCTION_PART(exp_part, f_exp)
VOX_FUNCTION_PART(log_part, f_log)
VOX_FUNCTION_PART(silu_part, f_silu)
VOX_FUNCTION_PART(gelu_part, f_gelu_tanh)
VOX_FUNCTION_PART(tanh_part, f_tanh)
#undef VOX_FUNCTION_PART

}  // namespace VOX_ISA
}  // namespace vox
