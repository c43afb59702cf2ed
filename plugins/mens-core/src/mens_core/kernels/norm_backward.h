// Gradient of RMSNorm over rows, or over the heads of rows.
#pragma once
#include "backward_tasks.h"
#include "definitions_backward.h"
#include "simd.h"

namespace vox {
namespace VOX_ISA {

// The chains of `Side` rows or chunks side by side.
template <int Side>
static inline void norm_chains(const float* dy, const float* x, const float* weight, int64_t stride,
                               int64_t weight_stride, int64_t count, NormSums* sums) {
  NormSums p[Side];
  for (int i = 0; i < Side; ++i) p[i] = {0.0f, 0.0f};
  for (int64_t k = 0; k < count; ++k)
    for (int i = 0; i < Side; ++i)
      p[i] = norm_step(dy[i * stride + k], x[i * stride + k], weight[i * weight_stride + k], p[i]);
  for (int i = 0; i < Side; ++i) sums[i] = p[i];
}

static NormSums norm_sums_folded(bool is_first, NormSums total, NormSums chunk) {
  return {chunk_folded(is_first, total.squares, chunk.squares),
          chunk_folded(is_first, total.products, chunk.products)};
}

static NormSums norm_sums(const float* dy, const float* x, const float* weight, int64_t width) {
  NormSums total{}, parts[4];
  int64_t done = 0;
  for (; done + 4 * kChunk <= width; done += 4 * kChunk) {
    norm_chains<4>(dy + done, x + done, weight + done, kChunk, kChunk, kChunk, parts);
    for (int i = 0; i < 4; ++i) total = norm_sums_folded(done + i == 0, total, parts[i]);
  }
  for (; done < width; done += kChunk) {
    norm_chains<1>(dy + done, x + done, weight + done, 0, 0, width - done < kChunk ? width - done : kChunk, parts);
    total = norm_sums_folded(done == 0, total, parts[0]);
  }
  return total;
}

static void norm_sums_of_eight(const float* dy, const float* x, const float* weight, int64_t width, NormSums* totals) {
  NormSums parts[8];
  for (int64_t done = 0; done < width; done += kChunk) {
    norm_chains<8>(dy + done, x + done, weight + done, width, 0, width - done < kChunk ? width - done : kChunk, parts);
    for (int i = 0; i < 8; ++i) totals[i] = norm_sums_folded(done == 0, totals[i], parts[i]);
  }
}

static bool norm_backward_row(const NormBackwardTask& task, int64_t row, NormSums sums) {
  const int64_t width = task.width;
  const float* dy = task.dy + row * width;
  const float* x = task.x + row * width;
  float* dx = task.dx + row * width;
  const float inverse = norm_inverse(sums.squares, (float)width, task.eps);
  const float c = norm_share(sums.products, inverse, (float)width);
  if (!is_finite(sums.squares)) {
    // An infinite sum would make the inverse zero, and hide: the row is NaN instead.
    for (int64_t i = 0; i < width; ++i) dx[i] = f_from(0x7FC00000);
    return false;
  }
  const VF inverse_all = f_splat(inverse), c_all = f_splat(c);
  FiniteWatch watch;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const VF y = norm_gradient(f_load(dy + i), f_load(x + i), f_load(task.weight + i), inverse_all, c_all);
    watch.see(y);
    f_store(dx + i, y);
  }
  bool finite = watch.saw_only_finite();
  for (; i < width; ++i) {
    dx[i] = norm_gradient(dy[i], x[i], task.weight[i], inverse, c);
    finite = finite && is_finite(dx[i]);
  }
  return finite;
}

static int64_t norm_backward_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& norm = *static_cast<const NormBackwardTask*>(task);
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t first = part * kNormRows;
    const int64_t last = first + kNormRows < norm.rows ? first + kNormRows : norm.rows;
    NormSums sums[kNormRows];
    if (last - first == 8) {
      norm_sums_of_eight(norm.dy + first * norm.width, norm.x + first * norm.width, norm.weight, norm.width, sums);
    } else {
      for (int64_t r = first; r < last; ++r)
        sums[r - first] = norm_sums(norm.dy + r * norm.width, norm.x + r * norm.width, norm.weight, norm.width);
    }
    for (int64_t r = first; r < last; ++r)
      if (!norm_backward_row(norm, r, sums[r - first]) && fault == 0) fault = 1 + r / norm.rows_per_fault;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
