// Operators whose outputs each depend on one element per argument.
#pragma once
#include "../definitions.h"
#include "args.h"

// In every kernel of this folder: faults[row] becomes 1 where an output of the row is not finite. Rows
// are those of the step; all that write the flag write the same.
#define VOX_WATCH(value, row) \
  if (!is_finite(value)) faults[row] = 1

// Kernels are global, so that a host finds them by their plain names.
using namespace vox;
using namespace vox::VOX_ISA;

// Rows lie one behind the other, and a row may be short: threads are elements, not rows of elements.
#define VOX_OF_ONE(name, expression)                                                                            \
  VOX_KERNEL(name)(VOX_IN(float, a_side, 0), VOX_OUT(float, out, 1), VOX_OUT(int32_t, faults, 2),               \
                   VOX_ARGS(ElementwiseArgs, 3)) {                                                              \
    const int64_t at = VOX_THREAD_X;                                                                            \
    if (at >= (int64_t)args.rows * args.width) return;                                                          \
    const float a = a_side[at];                                                                                 \
    const float y = expression;                                                                                 \
    out[at] = y;                                                                                                \
    VOX_WATCH(y, at / args.width);                                                                              \
  }
#define VOX_OF_TWO(name, expression)                                                                            \
  VOX_KERNEL(name)(VOX_IN(float, a_side, 0), VOX_IN(float, b_side, 1), VOX_OUT(float, out, 2),                  \
                   VOX_OUT(int32_t, faults, 3), VOX_ARGS(ElementwiseArgs, 4)) {                                 \
    const int64_t at = VOX_THREAD_X;                                                                            \
    if (at >= (int64_t)args.rows * args.width) return;                                                          \
    const float a = a_side[at], b = b_side[at];                                                                 \
    const float y = expression;                                                                                 \
    out[at] = y;                                                                                                \
    VOX_WATCH(y, at / args.width);                                                                              \
  }
VOX_OF_TWO(vox_add, f_add(a, b))
VOX_OF_TWO(vox_silu_gate, silu_gated(a, b))
VOX_OF_TWO(vox_gelu_gate, gelu_gated(a, b))
VOX_OF_TWO(vox_add_scaled, scaled_sum(a, b, args.value))
VOX_OF_ONE(vox_softcap, f_softcap(a, args.value))

// The elementary functions on their own, for tests.
VOX_KERNEL(vox_function)(VOX_IN(float, x, 0), VOX_OUT(float, out, 1), VOX_ARGS(FunctionArgs, 2)) {
  const int64_t i = VOX_THREAD_X;
  if (i >= args.elements) return;
  const float a = x[i];
  switch (args.which) {
    case 0: out[i] = f_exp(a); break;
    case 1: out[i] = f_log(a); break;
    case 2: out[i] = f_silu(a); break;
    case 3: out[i] = f_gelu_tanh(a); break;
    default: out[i] = f_tanh(a); break;
  }
}

// Rows of x by number; bits move, and nothing is flushed.
VOX_KERNEL(vox_take_rows)(VOX_IN(uint32_t, x, 0), VOX_IN(int32_t, rows, 1), VOX_OUT(uint32_t, out, 2),
                          VOX_ARGS(RowArgs, 3)) {
  if (VOX_THREAD_X >= args.width) return;
  out[VOX_THREAD_Y * args.width + VOX_THREAD_X] = x[(int64_t)rows[VOX_THREAD_Y] * args.width + VOX_THREAD_X];
}
