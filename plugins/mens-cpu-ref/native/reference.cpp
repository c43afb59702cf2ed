// The scalar reference: plain loops that define the bits (docs/numerics.md).
//
// It includes nothing of the kernel source, so a mistake there cannot hide here. Every float
// operation is written alone and rounded once; subnormals are flushed by the environment.
#include "abi.h"

#include "flush.h"

namespace {

bool is_finite(float a) { return a - a == 0.0f; }

// 0, or 1 + the first row with a value that is not finite.
int64_t first_fault(const float* out, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; ++i)
      if (!is_finite(out[r * width + i])) return 1 + r;
  return 0;
}

}  // namespace

extern "C" {

int64_t ref_add(const float* a, const float* b, int64_t rows, int64_t width, float* out) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) out[i] = a[i] + b[i];
  return first_fault(out, rows, width);
}
}
