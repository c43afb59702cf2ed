// Scaling, dropout, AdamW, and rows that change their place: docs/numerics.md, section 13.
#pragma once
#include "../definitions_update.h"
#include "elementwise.h"

VOX_OF_ONE(vox_scale, f_mul(a, args.value))

// The words of one counter are those of four columns.
VOX_KERNEL(vox_dropout)(VOX_IN(float, x, 0), VOX_IN(int32_t, positions, 1), VOX_IN(int32_t, examples, 2),
                        VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(DropoutArgs, 5)) {
  const int64_t first = VOX_THREAD_X * 4, row = VOX_THREAD_Y * args.width;
  if (first >= args.width) return;
  const uint32_t place = dropout_place((uint32_t)examples[VOX_THREAD_Y], (uint32_t)VOX_THREAD_X);
  const Words<int32_t> counter = {{positions[VOX_THREAD_Y], (int32_t)place, args.stream, args.step}};
  const Words<int32_t> random = philox<float>(counter, (uint32_t)args.seed_low, (uint32_t)args.seed_high);
  for (int i = 0; i < 4; ++i) {
    if (first + i >= args.width) continue;
    const float y = dropped(x[row + first + i], random.word[i], args.threshold, args.factor);
    out[row + first + i] = y;
    VOX_WATCH(y, VOX_THREAD_Y);
  }
}

// In place.
VOX_KERNEL(vox_adamw)(VOX_OUT(float, parameter, 0), VOX_IN(float, gradient, 1), VOX_OUT(float, m, 2),
                      VOX_OUT(float, v, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(AdamWArgs, 5)) {
  const int64_t at = VOX_THREAD_X;
  if (at >= (int64_t)args.rows * args.width) return;
  const AdamWTerms<float> by = {args.learning_rate,   args.beta1, args.one_minus_beta1, args.beta2,
                                args.one_minus_beta2, args.eps,   args.decay,           args.correction1,
                                args.correction2};
  const Moments<float> after = adamw_step(parameter[at], gradient[at], m[at], v[at], by);
  parameter[at] = after.parameter;
  m[at] = after.m;
  v[at] = after.v;
  VOX_WATCH(after.parameter, at / args.width);
  VOX_WATCH(after.m, at / args.width);
  VOX_WATCH(after.v, at / args.width);
}

// Row r of the result is row sources[r] of x, or zeros where that is -1; bits move, and nothing is flushed.
VOX_KERNEL(vox_put_rows)(VOX_IN(uint32_t, x, 0), VOX_IN(int32_t, sources, 1), VOX_OUT(uint32_t, out, 2),
                         VOX_ARGS(RowArgs, 3)) {
  if (VOX_THREAD_X >= args.width) return;
  const int64_t from = sources[VOX_THREAD_Y];
  out[VOX_THREAD_Y * args.width + VOX_THREAD_X] = from < 0 ? 0u : x[from * args.width + VOX_THREAD_X];
}

// A part of a result that several make, one behind the other.
VOX_KERNEL(vox_join)(VOX_IN(uint32_t, x, 0), VOX_OUT(uint32_t, out, 1), VOX_ARGS(JoinArgs, 2)) {
  if (VOX_THREAD_X < args.elements) out[args.first + VOX_THREAD_X] = x[VOX_THREAD_X];
}
