// Loads and stores at the end of a row, where fewer than sixteen elements may be left.
#pragma once
#include "simd.h"

namespace vox {
namespace VOX_ISA {

CANON VF load_up_to(const float* p, int64_t count) { return count == kLanes ? f_load(p) : f_load_some(p, count); }
CANON void store_watched(float* p, VF a, int64_t count, FiniteWatch& watch) {
  if (count == kLanes) {
    f_store(p, a);
    watch.see(a);
  } else {
    f_store_some(p, a, count);
    watch.see(f_load_some(p, count));
  }
}

}  // namespace VOX_ISA
}  // namespace vox
