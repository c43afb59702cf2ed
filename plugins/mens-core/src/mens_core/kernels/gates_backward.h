// Gradients of gated activations and softcap.
#pragma once
#include "backward_tasks.h"
#include "definitions_backward.h"
#include "elementwise.h"

namespace vox {
namespace VOX_ISA {

// Gradients of activation(gate) * up, for parts [begin, end) of the flat arrays.
template <class Slope>
static int64_t gate_backward(const void* task, int64_t begin, int64_t end, Slope activation) {
  const auto& gates = *static_cast<const GateBackwardTask*>(task);
  const int64_t first = begin * kElementsPerPart;
  const int64_t last = end * kElementsPerPart < gates.elements ? end * kElementsPerPart : gates.elements;
  FiniteWatch watch;
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) {
    const GateGradients<VF> d =
        gate_gradients(f_load(gates.dy + i), f_load(gates.up + i), activation(f_load(gates.gate + i)));
    watch.see(d.gate);
    watch.see(d.up);
    f_store(gates.dgate + i, d.gate);
    f_store(gates.dup + i, d.up);
  }
  if (const int64_t left = last - i; left > 0) {
    const GateGradients<VF> d = gate_gradients(f_load_some(gates.dy + i, left), f_load_some(gates.up + i, left),
                                               activation(f_load_some(gates.gate + i, left)));
    f_store_some(gates.dgate + i, d.gate, left);
    f_store_some(gates.dup + i, d.up, left);
    watch.see(f_load_some(gates.dgate + i, left));
    watch.see(f_load_some(gates.dup + i, left));
  }
  if (watch.saw_only_finite()) return 0;
  for (i = first; i < last; ++i)
    if (!is_finite(gates.dgate[i]) || !is_finite(gates.dup[i])) return 1 + i / gates.width;
  return 0;
}

static int64_t silu_gate_backward_part(const void* task, int64_t begin, int64_t end, void*) {
  return gate_backward(task, begin, end, [](VF x) { return f_silu_slope(x); });
}

static int64_t gelu_gate_backward_part(const void* task, int64_t begin, int64_t end, void*) {
  return gate_backward(task, begin, end, [](VF x) { return f_gelu_tanh_slope(x); });
}

static int64_t softcap_backward_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& softcap = *static_cast<const ElementwiseTask*>(task);
  const VF cap = f_splat(softcap.constant);
  return elementwise(softcap, begin, end, [cap](VF dy, VF x) { return softcap_gradient(dy, x, cap); });
}

}  // namespace VOX_ISA
}  // namespace vox
