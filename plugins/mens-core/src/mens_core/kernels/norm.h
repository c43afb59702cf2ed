// RMSNorm over rows, or over the heads of rows.
#pragma once
#include "c128.h"

namespace vox {
namespace VOX_ISA {

static bool norm_row(const float* x, const float* weight, float* out, int64_t width, float inverse) {
  FiniteWatch watch;
  const VF inv = f_splat(inverse);
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const VF y = normed(f_load(x + i), inv, f_load(weight + i));
    watch.see(y);
    f_store(out + i, y);
  }
  bool finite = watch.saw_only_finite();
  for (; i < width; ++i) {
    out[i] = normed(x[i], inverse, weight[i]);
    finite = finite && is_finite(out[i]);
  }
  return finite;
}

static int64_t norm_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& norm = *static_cast<const NormTask*>(task);
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t first = part * kNormRows;
    const int64_t last = first + kNormRows < norm.rows ? first + kNormRows : norm.rows;
    float sums[kNormRows];
    if (last - first == 8) {
      c128_eight_rows<SumOfSquares>(norm.x + first * norm.width, norm.width, sums);
    } else {
      for (int64_t r = first; r < last; ++r)
        sums[r - first] = c128_row<SumOfSquares>(norm.x + r * norm.width, norm.width);
    }
    for (int64_t r = first; r < last; ++r) {
      const float inverse = norm_inverse(sums[r - first], (float)norm.width, norm.eps);
      bool finite = norm_row(norm.x + r * norm.width, norm.weight, norm.out + r * norm.width, norm.width, inverse);
      if (!is_finite(sums[r - first])) {
        // An infinite sum makes every output zero, and would hide: the row is NaN instead.
        for (int64_t i = 0; i < norm.width; ++i) norm.out[r * norm.width + i] = f_from(0x7FC00000);
        finite = false;
      }
      if (!finite && fault == 0) fault = 1 + r / norm.rows_per_fault;
    }
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
