// Rotation of each head's halves by the angles of a table.
#pragma once
#include "simd.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

CANON void rotate(VF x1, VF x2, VF cosine, VF sine, VF* y1, VF* y2) {
  *y1 = f_fma(x1, cosine, f_neg(f_mul(x2, sine)));
  *y2 = f_fma(x2, cosine, f_mul(x1, sine));
}

static int64_t rope_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& rope = *static_cast<const RopeTask*>(task);
  const int64_t pairs = rope.pairs;
  int64_t fault = 0;
  for (int64_t r = begin; r < end; ++r) {
    const int64_t position = rope.positions[r];
    const int64_t at = rope.slots[position / kBlock] * kBlock + position % kBlock;
    const float* cosines = rope.table + at * 2 * pairs;
    const float* sines = cosines + pairs;
    FiniteWatch watch;
    for (int64_t h = 0; h < rope.heads; ++h) {
      const float* x = rope.x + (r * rope.heads + h) * 2 * pairs;
      float* y = rope.out + (r * rope.heads + h) * 2 * pairs;
      VF y1, y2;
      int64_t i = 0;
      for (; i + kLanes <= pairs; i += kLanes) {
        rotate(f_load(x + i), f_load(x + pairs + i), f_load(cosines + i), f_load(sines + i), &y1, &y2);
        watch.see(y1);
        watch.see(y2);
        f_store(y + i, y1);
        f_store(y + pairs + i, y2);
      }
      if (const int64_t left = pairs - i; left > 0) {
        rotate(f_load_some(x + i, left), f_load_some(x + pairs + i, left), f_load_some(cosines + i, left),
               f_load_some(sines + i, left), &y1, &y2);
        watch.see(y1);
        watch.see(y2);
        f_store_some(y + i, y1, left);
        f_store_some(y + pairs + i, y2, left);
      }
    }
    if (!watch.saw_only_finite() && fault == 0) fault = 1 + r;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
