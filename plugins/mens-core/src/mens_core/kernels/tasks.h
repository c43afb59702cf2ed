// What a kernel is told: plain data, the same on every lane.
#pragma once
#include <stdint.h>

namespace vox {

// Elementwise operators work on the flat array in parts of this many elements.
constexpr int64_t kElementsPerPart = 1024;

struct ElementwiseTask {
  const float* a;
  const float* b;  // null for operators of one argument
  float* out;
  int64_t elements;
  int64_t width;  // of a row, to name the row that is not finite
  float constant; // softcap's cap
};

}  // namespace vox
