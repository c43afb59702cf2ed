// Rotation of each head's halves by the angles of a table.
#pragma once
#include "definitions.h"
#include "rotate.h"

namespace vox {
namespace VOX_ISA {

static int64_t rope_part(const void* task, int64_t begin, int64_t end, void*) {
  return rotate_rows(task, begin, end, [](VF x1, VF x2, VF cosine, VF sine, VF* y1, VF* y2) {
    const auto both = rotated(x1, x2, cosine, sine);
    *y1 = both.first;
    *y2 = both.second;
  });
}

}  // namespace VOX_ISA
}  // namespace vox
