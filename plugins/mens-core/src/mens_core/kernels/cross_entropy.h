// The loss: softmax cross-entropy with its gradient, and sums of losses by example.
#pragma once
#include "c128.h"
#include "definitions_update.h"
#include "row_max.h"
#include "update_tasks.h"

namespace vox {
namespace VOX_ISA {

// e[i] = exp(x[i] - m), and their C128 sum.
static float softmax_numerators(const float* x, int64_t width, float m, float* e) {
  constexpr int64_t kStretch = 8 * kChunk;
  const VF top = f_splat(m);
  float total = 0.0f;
  for (int64_t first = 0; first < width; first += kStretch) {
    const int64_t count = width - first < kStretch ? width - first : kStretch;
    int64_t i = first;
    for (; i + kLanes <= first + count; i += kLanes) f_store(e + i, f_exp(f_sub(f_load(x + i), top)));
    for (; i < first + count; ++i) e[i] = f_exp(f_sub(x[i], m));
    float sums[8];
    int64_t chunks = count / kChunk;
    if (chunks == 8) {
      chains<PlainSum, 8>(e + first, kChunk, kChunk, sums);
    } else {
      for (int64_t c = 0; c * kChunk < count; ++c)
        chains<PlainSum, 1>(e + first + c * kChunk, 0, count - c * kChunk < kChunk ? count - c * kChunk : kChunk,
                            sums + c);
      chunks = (count + kChunk - 1) / kChunk;
    }
    for (int64_t c = 0; c < chunks; ++c) total = first + c == 0 ? sums[0] : f_add(total, sums[c]);
  }
  return total;
}

static int64_t cross_entropy_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const CrossEntropyTask*>(opaque);
  int64_t fault = 0;
  for (int64_t r = begin; r < end; ++r) {
    const float* x = task.logits + r * task.width;
    float* gradient = task.gradients + r * task.width;
    const int64_t target = task.targets[r];
    const float m = row_max(x, task.width);
    const float sum = softmax_numerators(x, task.width, m, gradient);
    task.losses[r] = row_loss(m, sum, x[target]);
    int64_t i = 0;
    for (; i + kLanes <= task.width; i += kLanes) f_store(gradient + i, f_div(f_load(gradient + i), f_splat(sum)));
    for (; i < task.width; ++i) gradient[i] = f_div(gradient[i], sum);
    gradient[target] = target_gradient(gradient[target]);
    // Every numerator is at most 1 and the sum at least 1: the loss alone can be not finite.
    if (!is_finite(task.losses[r]) && fault == 0) fault = 1 + r;
  }
  return fault;
}

static int64_t example_sums_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const ExampleSumsTask*>(opaque);
  int64_t fault = 0;
  for (int64_t e = begin; e < end; ++e) {
    float total = 0.0f;
    bool is_started = false;
    for (int64_t i = task.starts[e]; i < task.starts[e + 1];) {
      const int64_t chunk = task.positions[i] / kChunk;
      float p = 0.0f;
      for (; i < task.starts[e + 1] && task.positions[i] / kChunk == chunk; ++i) p = f_add(p, task.losses[i]);
      total = is_started ? f_add(total, p) : p;
      is_started = true;
    }
    task.out[e] = total;
    if (!is_finite(total) && fault == 0) fault = 1 + e;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
