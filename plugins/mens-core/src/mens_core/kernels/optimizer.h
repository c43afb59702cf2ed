// Scaling, the norm of gradients, and AdamW.
#pragma once
#include "c128.h"
#include "definitions_update.h"
#include "elementwise.h"
#include "ends.h"
#include "update_tasks.h"

namespace vox {
namespace VOX_ISA {

static int64_t scale_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const ElementwiseTask*>(opaque);
  const VF factor = f_splat(task.constant);
  return elementwise(task, begin, end, [factor](VF x, VF) { return f_mul(x, factor); });
}

static int64_t add_scaled_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const ElementwiseTask*>(opaque);
  const VF factor = f_splat(task.constant);
  return elementwise(task, begin, end, [factor](VF y, VF x) { return scaled_sum(y, x, factor); });
}

static int64_t sum_of_squares_part(const void* opaque, int64_t, int64_t, void*) {
  const auto& task = *static_cast<const SquaresTask*>(opaque);
  *task.out = c128_row<SumOfSquares>(task.x, task.elements);
  return is_finite(*task.out) ? 0 : 1;
}

CANON AdamWTerms<VF> in_every_lane(const AdamWConstants& by) {
  return {f_splat(by.learning_rate),   f_splat(by.beta1), f_splat(by.one_minus_beta1), f_splat(by.beta2),
          f_splat(by.one_minus_beta2), f_splat(by.eps),   f_splat(by.decay),           f_splat(by.correction1),
          f_splat(by.correction2)};
}

static int64_t adamw_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const AdamWTask*>(opaque);
  const int64_t first = begin * kElementsPerPart;
  const int64_t last = end * kElementsPerPart < task.elements ? end * kElementsPerPart : task.elements;
  const AdamWTerms<VF> by = in_every_lane(task.by);
  FiniteWatch watch;
  for (int64_t i = first; i < last; i += kLanes) {
    const int64_t count = last - i < kLanes ? last - i : kLanes;
    const Moments<VF> after =
        adamw_step(load_up_to(task.parameter + i, count), load_up_to(task.gradient + i, count),
                   load_up_to(task.m + i, count), load_up_to(task.v + i, count), by);
    store_watched(task.parameter + i, after.parameter, count, watch);
    store_watched(task.m + i, after.m, count, watch);
    store_watched(task.v + i, after.v, count, watch);
  }
  if (watch.saw_only_finite()) return 0;
  for (int64_t i = first; i < last; ++i)
    if (!is_finite(task.parameter[i]) || !is_finite(task.m[i]) || !is_finite(task.v[i])) return 1 + i / task.width;
  return 0;
}

}  // namespace VOX_ISA
}  // namespace vox
