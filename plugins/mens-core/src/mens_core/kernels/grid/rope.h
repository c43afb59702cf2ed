// Rotation of each head's halves by the angles of a table. The table itself is made on the host, natively:
// it takes products of 128 bits, which Metal lacks.
#pragma once
#include "elementwise.h"

// table: [slot][128 positions][2][pairs], cosines then sines; slots[block of positions] is a slot.
#define VOX_ROPE(name, rotated)                                                                                 \
  VOX_KERNEL(name)(VOX_IN(float, x, 0), VOX_IN(float, table, 1), VOX_IN(int32_t, slots, 2),                     \
                   VOX_IN(int32_t, positions, 3), VOX_OUT(float, out, 4), VOX_OUT(int32_t, faults, 5),          \
                   VOX_ARGS(RopeArgs, 6)) {                                                                     \
    if (VOX_THREAD_X >= (int64_t)args.heads * args.pairs) return;                                               \
    const int64_t head = VOX_THREAD_X / args.pairs, i = VOX_THREAD_X % args.pairs;                              \
    const int32_t position = positions[VOX_THREAD_Y];                                                           \
    const int64_t at = slots[position / (int32_t)kBlock] * kBlock + position % (int32_t)kBlock;                 \
    const float cosine = table[at * 2 * args.pairs + i], sine = table[(at * 2 + 1) * args.pairs + i];           \
    const int64_t first = (VOX_THREAD_Y * args.heads + head) * 2 * args.pairs + i;                              \
    const Halves<float> y = rotated(x[first], x[first + args.pairs], cosine, sine);                             \
    out[first] = y.first;                                                                                       \
    out[first + args.pairs] = y.second;                                                                         \
    VOX_WATCH(y.first, VOX_THREAD_Y);                                                                           \
    VOX_WATCH(y.second, VOX_THREAD_Y);                                                                          \
  }
VOX_ROPE(vox_rope, rotated)
