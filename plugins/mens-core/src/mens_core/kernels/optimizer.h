// Scaling, the norm of gradients, and AdamW.
#pragma once
#include "c128.h"
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
  return elementwise(task, begin, end, [factor](VF y, VF x) { return f_add(y, f_mul(x, factor)); });
}

static int64_t sum_of_squares_part(const void* opaque, int64_t, int64_t, void*) {
  const auto& task = *static_cast<const SquaresTask*>(opaque);
  *task.out = c128_row<SumOfSquares>(task.x, task.elements);
  return is_finite(*task.out) ? 0 : 1;
}

struct Moments {
  VF parameter, m, v;
};

CANON Moments adamw_step(VF parameter, VF g, VF m, VF v, const AdamWConstants& by) {
  m = f_fma(f_splat(by.beta1), m, f_mul(f_splat(by.one_minus_beta1), g));
  v = f_fma(f_splat(by.beta2), v, f_mul(f_splat(by.one_minus_beta2), f_mul(g, g)));
  const VF root = f_sqrt(f_div(v, f_splat(by.correction2)));
  const VF step = f_div(f_div(m, f_splat(by.correction1)), f_add(root, f_splat(by.eps)));
  parameter = f_sub(f_mul(parameter, f_splat(by.decay)), f_mul(f_splat(by.learning_rate), step));
  return {parameter, m, v};
}

static int64_t adamw_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const AdamWTask*>(opaque);
  const int64_t first = begin * kElementsPerPart;
  const int64_t last = end * kElementsPerPart < task.elements ? end * kElementsPerPart : task.elements;
  FiniteWatch watch;
  for (int64_t i = first; i < last; i += kLanes) {
    const int64_t count = last - i < kLanes ? last - i : kLanes;
    const Moments after = adamw_step(load_up_to(task.parameter + i, count), load_up_to(task.gradient + i, count),
                                     load_up_to(task.m + i, count), load_up_to(task.v + i, count), task.by);
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
