// Rotation of each head's halves by the angles of a table.
#pragma once
#include "definitions.h"
#include "simd.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

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
      int64_t i = 0;
      for (; i + kLanes <= pairs; i += kLanes) {
        const auto both = rotated(f_load(x + i), f_load(x + pairs + i), f_load(cosines + i), f_load(sines + i));
        watch.see(both.first);
        watch.see(both.second);
        f_store(y + i, both.first);
        f_store(y + pairs + i, both.second);
      }
      if (const int64_t left = pairs - i; left > 0) {
        const auto both = rotated(f_load_some(x + i, left), f_load_some(x + pairs + i, left),
                                  f_load_some(cosines + i, left), f_load_some(sines + i, left));
        watch.see(both.first);
        watch.see(both.second);
        f_store_some(y + i, both.first, left);
        f_store_some(y + pairs + i, both.second, left);
      }
    }
    if (!watch.saw_only_finite() && fault == 0) fault = 1 + r;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
