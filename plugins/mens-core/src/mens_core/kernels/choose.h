// What choosing a token needs of a row of logits.
#pragma once
#include "c128.h"
#include "row_max.h"

namespace vox {
namespace VOX_ISA {

static int64_t row_max_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& rows = *static_cast<const RowMaxTask*>(task);
  for (int64_t r = begin; r < end; ++r) rows.out[r] = row_max(rows.x + r * rows.width, rows.width);
  return 0;
}

static int64_t penalise_part(const void* task, int64_t, int64_t, void*) {
  const auto& penalty = *static_cast<const PenaliseTask*>(task);
  bool finite = true;
  for (int64_t i = 0; i < penalty.count; ++i) {
    float& x = penalty.logits[penalty.token_ids[i]];
    x = 0.0f < x ? f_div(x, penalty.repetition[i]) : f_mul(x, penalty.repetition[i]);
    x = f_sub(x, penalty.subtract[i]);
    finite = finite && is_finite(x);
  }
  return finite ? 0 : 1;
}

static int64_t argmax_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& argmax = *static_cast<const ArgmaxTask*>(task);
  for (int64_t r = begin; r < end; ++r) {
    const float* x = argmax.x + r * argmax.width;
    const float m = row_max(x, argmax.width);
    int32_t at = 0;
    while (at < argmax.width - 1 && !(x[at] == m)) ++at;  // -0 == +0, so the lowest id of either wins
    argmax.out[r] = at;
  }
  return 0;
}

// exp((x - max) / T), the numerator of a softmax at temperature T.
template <class V>
CANON V tempered(V x, V max, V temperature) {
  return f_exp(f_div(f_sub(x, max), temperature));
}

// floor(e * 2^32) for e in [0, 1]: exact, the product only moves the exponent.
CANON uint64_t fixed_point_32(float e) { return (uint64_t)(int64_t)f_mul(e, f_from(0x4F800000)); }

static int64_t token_weights_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& weights = *static_cast<const TokenWeightsTask*>(task);
  const int64_t last = end * kElementsPerPart < weights.width ? end * kElementsPerPart : weights.width;
  const VF max = f_splat(weights.max), temperature = f_splat(weights.temperature);
  int64_t i = begin * kElementsPerPart;
  for (; i + kLanes <= last; i += kLanes) {
    float e[kLanes];
    f_store(e, tempered(f_load(weights.x + i), max, temperature));
    for (int j = 0; j < kLanes; ++j) weights.out[i + j] = fixed_point_32(e[j]);
  }
  for (; i < last; ++i) weights.out[i] = fixed_point_32(tempered(weights.x[i], weights.max, weights.temperature));
  return 0;
}

static int64_t log_normaliser_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& rows = *static_cast<const LogNormaliserTask*>(task);
  constexpr int64_t kStretch = 8 * kChunk;
  int64_t fault = 0;
  for (int64_t r = begin; r < end; ++r) {
    const float* x = rows.x + r * rows.width;
    const float m = row_max(x, rows.width);
    float total = 0.0f;
    for (int64_t i = 0; i < rows.width; i += kStretch) {
      const int64_t count = rows.width - i < kStretch ? rows.width - i : kStretch;
      float e[kStretch];
      int64_t j = 0;
      for (; j + kLanes <= count; j += kLanes) f_store(e + j, f_exp(f_sub(f_load(x + i + j), f_splat(m))));
      for (; j < count; ++j) e[j] = f_exp(f_sub(x[i + j], m));
      float sums[8];
      int64_t chunks = count / kChunk;
      if (chunks == 8) {
        chains<PlainSum, 8>(e, kChunk, kChunk, sums);
      } else {
        for (int64_t c = 0; c * kChunk < count; ++c)
          chains<PlainSum, 1>(e + c * kChunk, 0, count - c * kChunk < kChunk ? count - c * kChunk : kChunk, sums + c);
        chunks = (count + kChunk - 1) / kChunk;
      }
      for (int64_t c = 0; c < chunks; ++c) total = i + c == 0 ? sums[0] : f_add(total, sums[c]);
    }
    // log is defined for finite numbers: a sum that is not is passed on as it is.
    rows.out[r] = is_finite(total) ? f_add(m, f_log(total)) : total;
    if (!is_finite(rows.out[r]) && fault == 0) fault = 1 + r;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
