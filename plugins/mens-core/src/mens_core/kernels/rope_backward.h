// Rotation of a gradient's halves back, by the negative angles.
#pragma once
#include "definitions_backward.h"
#include "rotate.h"

namespace vox {
namespace VOX_ISA {

static int64_t rope_backward_part(const void* task, int64_t begin, int64_t end, void*) {
  return rotate_rows(task, begin, end, [](VF d1, VF d2, VF cosine, VF sine, VF* x1, VF* x2) {
    const Halves<VF> x = rotated_back(d1, d2, cosine, sine);
    *x1 = x.first;
    *x2 = x.second;
  });
}

}  // namespace VOX_ISA
}  // namespace vox
