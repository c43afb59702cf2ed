// What choosing a token needs of a row of logits.
#pragma once
#include "elementwise.h"
#include "group.h"

// In place, on the ids of one row; each id once.
VOX_KERNEL(vox_penalise)(VOX_OUT(float, logits, 0), VOX_IN(int32_t, ids, 1), VOX_IN(float, repetition, 2),
                         VOX_IN(float, subtract, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(PenaliseArgs, 5)) {
  const int64_t i = VOX_THREAD_X;
  if (i >= args.count) return;
  const int64_t at = (int64_t)args.row * args.width + ids[i];
  const float y = penalised(logits[at], repetition[i], subtract[i]);
  logits[at] = y;
  VOX_WATCH(y, args.row);
}

// The lowest id of a greatest logit; -0 equals +0. A group is a row.
VOX_KERNEL(vox_argmax)(VOX_IN(float, x, 0), VOX_OUT(int32_t, out, 1), VOX_ARGS(RowArgs, 2)) {
  VOX_SHARED float most[kGroup];
  VOX_SHARED int32_t ids[kGroup];
  const int64_t row = VOX_GROUP_X * args.width;
  float best = x[row];
  int32_t id = 0;
  for (int32_t i = VOX_LOCAL; i < args.width; i += kGroup) {
    if (!(best < x[row + i])) continue;
    best = x[row + i];
    id = i;
  }
  most[VOX_LOCAL] = best;
  ids[VOX_LOCAL] = id;
  VOX_BARRIER();
  if (VOX_LOCAL != 0) return;
  for (int i = 1; i < kGroup; ++i) {
    if (best < most[i] || (best == most[i] && ids[i] < id)) {
      best = most[i];
      id = ids[i];
    }
  }
  out[VOX_GROUP_X] = id;
}

VOX_KERNEL(vox_row_max)(VOX_IN(float, x, 0), VOX_OUT(float, out, 1), VOX_ARGS(RowArgs, 2)) {
  VOX_SHARED float shared[kGroup];
  const float m = group_row_max(x + VOX_GROUP_X * args.width, args.width, shared, VOX_LOCAL);
  if (VOX_LOCAL == 0) out[VOX_GROUP_X] = m;
}

// Of one row, with the row's maximum in row_max[row].
VOX_KERNEL(vox_token_weights)(VOX_IN(float, x, 0), VOX_IN(float, row_max, 1), VOX_OUT(uint64_t, out, 2),
                              VOX_ARGS(TokenWeightsArgs, 3)) {
  const int64_t i = VOX_THREAD_X;
  if (i >= args.width) return;
  out[i] = fixed_point_32(tempered(x[(int64_t)args.row * args.width + i], row_max[args.row], args.temperature));
}

VOX_KERNEL(vox_log_normaliser)(VOX_IN(float, x, 0), VOX_OUT(float, out, 1), VOX_OUT(int32_t, faults, 2),
                               VOX_ARGS(RowArgs, 3)) {
  VOX_SHARED float shared[kGroup];
  const int64_t row = VOX_GROUP_X * args.width;
  const float m = group_row_max(x + row, args.width, shared, VOX_LOCAL);
  float sum = 0.0f;
  for (int32_t first = 0; first * (int32_t)kChunk < args.width; first += kGroup) {
    float p = 0.0f;
    for (int32_t k = 0; k < (int32_t)kChunk; ++k) {
      const int32_t i = (first + VOX_LOCAL) * (int32_t)kChunk + k;
      if (i < args.width) p = PlainSum::step(f_exp(f_sub(x[row + i], m)), p);
    }
    sum = group_chunks_folded(first == 0, sum, p, chunks_of_round(args.width, first), shared, VOX_LOCAL);
  }
  if (VOX_LOCAL != 0) return;
  const float y = normaliser(m, sum);
  out[VOX_GROUP_X] = y;
  VOX_WATCH(y, VOX_GROUP_X);
}
