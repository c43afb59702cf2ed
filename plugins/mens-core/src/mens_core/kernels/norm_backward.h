// Gradient of RMSNorm over rows, or over the heads of rows.
#pragma once
#include "backward_tasks.h"
#include "simd.h"

namespace vox {
namespace VOX_ISA {

struct NormSums {
  float squares, products;  // C128 of x x, and of (dy w) x
};

// The chains of `Side` rows or chunks side by side.
template <int Side>
static inline void norm_chains(const float* dy, const float* x, const float* weight, int64_t stride,
                               int64_t weight_stride, int64_t count, NormSums* sums) {
  NormSums p[Side];
  for (int i = 0; i < Side; ++i) p[i] = {0.0f, 0.0f};
  for (int64_t k = 0; k < count; ++k)
    for (int i = 0; i < Side; ++i) {
      const float a = x[i * stride + k];
      p[i].squares = f_fma(a, a, p[i].squares);
      p[i].products = f_fma(f_mul(dy[i * stride + k], weight[i * weight_stride + k]), a, p[i].products);
    }
  for (int i = 0; i < Side; ++i) sums[i] = p[i];
}

static void fold_sums(NormSums& total, NormSums part, bool is_first) {
  total = is_first ? part
                   : NormSums{f_add(total.squares, part.squares), f_add(total.products, part.products)};
}

static NormSums norm_sums(const float* dy, const float* x, const float* weight, int64_t width) {
  NormSums total{}, parts[4];
  int64_t done = 0;
  for (; done + 4 * kChunk <= width; done += 4 * kChunk) {
    norm_chains<4>(dy + done, x + done, weight + done, kChunk, kChunk, kChunk, parts);
    for (int i = 0; i < 4; ++i) fold_sums(total, parts[i], done + i == 0);
  }
  for (; done < width; done += kChunk) {
    norm_chains<1>(dy + done, x + done, weight + done, 0, 0, width - done < kChunk ? width - done : kChunk, parts);
    fold_sums(total, parts[0], done == 0);
  }
  return total;
}

static void norm_sums_of_eight(const float* dy, const float* x, const float* weight, int64_t width, NormSums* totals) {
  NormSums parts[8];
  for (int64_t done = 0; done < width; done += kChunk) {
    norm_chains<8>(dy + done, x + done, weight + done, width, 0, width - done < kChunk ? width - done : kChunk, parts);
    for (int i = 0; i < 8; ++i) fold_sums(totals[i], parts[i], done == 0);
  }
}

// (dy w - (x inv) c) inv
template <class V>
CANON V norm_gradient(V dy, V x, V weight, V inverse, V c) {
  return f_mul(f_fma(f_neg(f_mul(x, inverse)), c, f_mul(dy, weight)), inverse);
}

static bool norm_backward_row(const NormBackwardTask& task, int64_t row, NormSums sums) {
  const int64_t width = task.width;
  const float* dy = task.dy + row * width;
  const float* x = task.x + row * width;
  float* dx = task.dx + row * width;
  const float inverse = f_div(1.0f, f_sqrt(f_add(f_div(sums.squares, (float)width), task.eps)));
  const float c = f_div(f_mul(sums.products, inverse), (float)width);
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
