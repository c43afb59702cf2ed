// Rotation of each head's halves by the angles of a table.
#pragma once
#include "rotate.h"

namespace vox {
namespace VOX_ISA {

static int64_t rope_part(const void* task, int64_t begin, int64_t end, void*) {
  return rotate_rows(task, begin, end, [](VF x1, VF x2, VF cosine, VF sine, VF* y1, VF* y2) {
    *y1 = f_fma(x1, cosine, f_neg(f_mul(x2, sine)));
    *y2 = f_fma(x2, cosine, f_mul(x1, sine));
  });
}

}  // namespace VOX_ISA
}  // namespace vox
