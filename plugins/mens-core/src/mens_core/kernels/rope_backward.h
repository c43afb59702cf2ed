// Rotation of a gradient's halves back, by the negative angles.
#pragma once
#include "rotate.h"

namespace vox {
namespace VOX_ISA {

static int64_t rope_backward_part(const void* task, int64_t begin, int64_t end, void*) {
  return rotate_rows(task, begin, end, [](VF d1, VF d2, VF cosine, VF sine, VF* x1, VF* x2) {
    *x1 = f_fma(d1, cosine, f_mul(d2, sine));
    *x2 = f_fma(d2, cosine, f_neg(f_mul(d1, sine)));
  });
}

}  // namespace VOX_ISA
}  // namespace vox
