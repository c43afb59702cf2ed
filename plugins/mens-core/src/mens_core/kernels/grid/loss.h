// The loss with its gradient, and sums by chunk: docs/numerics.md, sections 13.2, 13.3 and 13.6.
//
// A long row is many chunks: groups sum them side by side, and one folds the sums in order.
#pragma once
#include "../definitions_update.h"
#include "elementwise.h"
#include "group.h"

namespace vox {
namespace VOX_ISA {

// The thread's chunk, of those from `first` on. A group reads pieces of all its chunks at once, so that
// neighbouring threads read neighbouring terms; `pieces` holds them.
template <class Step>
CANON float chunk_of_group(VOX_DEVICE const float* x, int64_t width, int64_t first, VOX_SHARED_POINTER float* pieces,
                           int32_t local) {
  float p = 0.0f;
  for (int32_t piece = 0; piece < (int32_t)kChunk; piece += kPiece) {
    VOX_BARRIER();  // the last pieces are read
    for (int32_t i = local; i < kGroup * kPiece; i += kGroup) {
      const int32_t chunk = i / kPiece, k = i % kPiece;
      const int64_t at = (first + chunk) * kChunk + piece + k;
      if (at < width) pieces[chunk * (kPiece + 1) + k] = x[at];
    }
    VOX_BARRIER();
    for (int32_t k = 0; k < kPiece; ++k)
      if ((first + local) * kChunk + piece + k < width) p = Step::step(pieces[local * (kPiece + 1) + k], p);
  }
  return p;
}

// The fold of a row's chunk sums, in every thread.
CANON float chunks_folded(VOX_DEVICE const float* chunks, int32_t count, VOX_SHARED_POINTER float* shared, int local) {
  float total = 0.0f;
  for (int32_t first = 0; first < count; first += kGroup) {
    const float chunk = first + local < count ? chunks[first + local] : 0.0f;
    const int some = count - first < kGroup ? count - first : kGroup;
    total = group_chunks_folded(first == 0, total, chunk, some, shared, local);
  }
  return total;
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_CHUNKS(name, Step)                                                                                   \
  VOX_KERNEL(name)(VOX_IN(float, x, 0), VOX_OUT(float, out, 1), VOX_ARGS(ChunksArgs, 2)) {                       \
    VOX_SHARED float pieces[kPieces];                                                                            \
    const int64_t first = VOX_GROUP_X * kGroup;                                                                  \
    const float p = chunk_of_group<Step>(x + VOX_GROUP_Y * args.width, args.width, first, pieces, VOX_LOCAL);    \
    if (first + VOX_LOCAL < args.chunks) out[VOX_GROUP_Y * args.chunks + first + VOX_LOCAL] = p;                 \
  }
VOX_CHUNKS(vox_chunk_sums, PlainSum)
VOX_CHUNKS(vox_chunk_squares, SumOfSquares)
#undef VOX_CHUNKS

// One group; a fault names row 0.
VOX_KERNEL(vox_chunks_folded)(VOX_IN(float, chunks, 0), VOX_OUT(float, out, 1), VOX_OUT(int32_t, faults, 2),
                              VOX_ARGS(RowArgs, 3)) {
  VOX_SHARED float shared[kGroup];
  const float y = chunks_folded(chunks, args.width, shared, VOX_LOCAL);
  if (VOX_LOCAL != 0) return;
  out[0] = y;
  VOX_WATCH(y, 0);
}

// --- cross-entropy: numerators, their chunks (vox_chunk_sums), the loss, shares ---------------------------

VOX_KERNEL(vox_numerators)(VOX_IN(float, x, 0), VOX_IN(float, row_max, 1), VOX_OUT(float, out, 2),
                           VOX_ARGS(RowArgs, 3)) {
  if (VOX_THREAD_X >= args.width) return;
  const int64_t at = VOX_THREAD_Y * args.width + VOX_THREAD_X;
  out[at] = f_exp(f_sub(x[at], row_max[VOX_THREAD_Y]));
}

VOX_KERNEL(vox_loss)(VOX_IN(float, x, 0), VOX_IN(float, row_max, 1), VOX_IN(float, chunks, 2),
                     VOX_IN(int32_t, targets, 3), VOX_OUT(float, sums, 4), VOX_OUT(float, losses, 5),
                     VOX_OUT(int32_t, faults, 6), VOX_ARGS(ChunksArgs, 7)) {
  VOX_SHARED float shared[kGroup];
  const int64_t row = VOX_GROUP_X;
  const float sum = chunks_folded(chunks + row * args.chunks, args.chunks, shared, VOX_LOCAL);
  if (VOX_LOCAL != 0) return;
  const float loss = row_loss(row_max[row], sum, x[row * args.width + targets[row]]);
  sums[row] = sum;
  losses[row] = loss;
  VOX_WATCH(loss, row);
}

// In place. Every numerator is at most 1 and the sum at least 1: the loss alone can be not finite.
VOX_KERNEL(vox_loss_gradient)(VOX_OUT(float, gradients, 0), VOX_IN(float, sums, 1), VOX_IN(int32_t, targets, 2),
                              VOX_ARGS(RowArgs, 3)) {
  if (VOX_THREAD_X >= args.width) return;
  const int64_t at = VOX_THREAD_Y * args.width + VOX_THREAD_X;
  const float share = f_div(gradients[at], sums[VOX_THREAD_Y]);
  gradients[at] = VOX_THREAD_X == targets[VOX_THREAD_Y] ? target_gradient(share) : share;
}

// --- sums whose chunks may be empty -----------------------------------------------------------------------

// Sum y of x's rows numbers[starts[y]] to numbers[starts[y + 1]], each in the chunk of its position in
// its example; a chunk without terms takes no part. It goes to row places[y] of example examples[y].
VOX_KERNEL(vox_sums_by_position)(VOX_IN(float, x, 0), VOX_IN(int32_t, numbers, 1), VOX_IN(int32_t, positions, 2),
                                 VOX_IN(int32_t, starts, 3), VOX_IN(int32_t, places, 4), VOX_IN(int32_t, examples, 5),
                                 VOX_OUT(float, out, 6), VOX_OUT(int32_t, faults, 7), VOX_ARGS(SumsArgs, 8)) {
  if (VOX_THREAD_X >= args.width) return;
  const int32_t end = starts[VOX_THREAD_Y + 1], example = examples[VOX_THREAD_Y];
  float total = 0.0f;
  bool is_first = true;
  for (int32_t i = starts[VOX_THREAD_Y]; i < end;) {
    const int32_t chunk = positions[i] / (int32_t)kChunk;
    float p = 0.0f;
    for (; i < end && positions[i] / (int32_t)kChunk == chunk; ++i)
      p = PlainSum::step(x[(int64_t)numbers[i] * args.width + VOX_THREAD_X], p);
    total = chunk_folded(is_first, total, p);
    is_first = false;
  }
  out[(int64_t)example * args.stride + (int64_t)places[VOX_THREAD_Y] * args.width + VOX_THREAD_X] = total;
  VOX_WATCH(total, example);
}
