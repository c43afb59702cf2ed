// Operators whose outputs each depend on one element per argument.
#pragma once
#include "definitions.h"
#include "simd.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

// Applies `op` to parts [begin, end) of the flat arrays. Two-argument form; b may equal a.
template <class Op>
static int64_t elementwise(const ElementwiseTask& task, int64_t begin, int64_t end, Op op) {
  const int64_t first = begin * kElementsPerPart;
  const int64_t last = end * kElementsPerPart < task.elements ? end * kElementsPerPart : task.elements;
  const float* b = task.b == nullptr ? task.a : task.b;
  FiniteWatch watch;
  int64_t i = first;
  for (; i + kLanes <= last; i += kLanes) {
    const VF y = op(f_load(task.a + i), f_load(b + i));
    watch.see(y);
    f_store(task.out + i, y);
  }
  if (i < last) {
    const VF y = op(f_load_some(task.a + i, last - i), f_load_some(b + i, last - i));
    f_store_some(task.out + i, y, last - i);
    watch.see(f_load_some(task.out + i, last - i));
  }
  if (watch.saw_only_finite()) return 0;
  for (i = first; i < last; ++i)
    if (!is_finite(task.out[i])) return 1 + i / task.width;
  return 0;
}

}  // namespace VOX_ISA
}  // namespace vox
