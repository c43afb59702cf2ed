// RMSNorm over rows, or over the heads of rows.
#pragma once
#include "elementwise.h"
#include "group.h"

VOX_KERNEL(vox_norm)(VOX_IN(float, x, 0), VOX_IN(float, weight, 1), VOX_OUT(float, out, 2),
                     VOX_OUT(int32_t, faults, 3), VOX_ARGS(NormArgs, 4)) {
  VOX_SHARED float chunks[kGroup];
  const int64_t start = (VOX_GROUP_Y * args.heads + VOX_GROUP_X) * args.width;
  float sum = 0.0f;
  for (int32_t first = 0; first * (int32_t)kChunk < args.width; first += kGroup) {
    float p = 0.0f;
    for (int32_t k = 0; k < (int32_t)kChunk; ++k) {
      const int32_t i = (first + VOX_LOCAL) * (int32_t)kChunk + k;
      if (i < args.width) p = SumOfSquares::step(x[start + i], p);
    }
    sum = group_chunks_folded(first == 0, sum, p, chunks_of_round(args.width, first), chunks, VOX_LOCAL);
  }
  const float inverse = norm_inverse(sum, (float)args.width, args.eps);
  for (int32_t i = VOX_LOCAL; i < args.width; i += kGroup) {
    // An infinite sum makes every output zero, and would hide: the row is NaN instead.
    const float y = is_finite(sum) ? normed(x[start + i], inverse, weight[i]) : f_from(0x7FC00000);
    out[start + i] = y;
    VOX_WATCH(y, VOX_GROUP_Y);
  }
}
