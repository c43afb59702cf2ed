// Rows whose heads are two halves, and the angles of a table.
#pragma once
#include "simd.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

// `turn` of every pair of each row's heads, by the angles of the row's position.
template <class Rotate>
static int64_t rotate_rows(const void* task, int64_t begin, int64_t end, Rotate turn) {
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
        turn(f_load(x + i), f_load(x + pairs + i), f_load(cosines + i), f_load(sines + i), &y1, &y2);
        watch.see(y1);
        watch.see(y2);
        f_store(y + i, y1);
        f_store(y + pairs + i, y2);
      }
      if (const int64_t left = pairs - i; left > 0) {
        turn(f_load_some(x + i, left), f_load_some(x + pairs + i, left), f_load_some(cosines + i, left),
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
