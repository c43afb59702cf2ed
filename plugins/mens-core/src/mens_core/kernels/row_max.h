// The maximum of a row, which has no order.
#pragma once
#include "simd.h"

namespace vox {
namespace VOX_ISA {

// The largest of x[0..width), with -0 as +0.
static float row_max(const float* x, int64_t width) {
  VF most[4];
  for (auto& m : most) m = f_splat(x[0]);
  int64_t i = 0;
  for (; i + 4 * kLanes <= width; i += 4 * kLanes)
    for (int j = 0; j < 4; ++j) most[j] = f_max(most[j], f_load(x + i + j * kLanes));
  float lanes[kLanes];
  f_store(lanes, f_max(f_max(most[0], most[1]), f_max(most[2], most[3])));
  float m = lanes[0];
  for (float lane : lanes) m = f_max(m, lane);
  for (; i < width; ++i) m = f_max(m, x[i]);
  return f_add(m, 0.0f);
}

}  // namespace VOX_ISA
}  // namespace vox
