// What the threads of a group do together, through memory they share.
//
// Nothing here is a sum in an order of its own: a maximum takes any order, and chunks are folded by
// one thread, ascending.
#pragma once
#include "../definitions.h"
#include "args.h"

namespace vox {
namespace VOX_ISA {

// The largest of x[0..width), with -0 as +0, in every thread. `shared` holds kGroup floats, and is free
// again after the next barrier.
CANON float group_row_max(VOX_DEVICE const float* x, int32_t width, VOX_SHARED_POINTER float* shared, int local) {
  float m = x[0];
  for (int32_t i = local; i < width; i += kGroup) m = f_max(m, x[i]);
  shared[local] = m;
  VOX_BARRIER();
  for (int i = 0; i < kGroup; ++i) m = f_max(m, shared[i]);
  return f_add(m, 0.0f);
}

// One round of C128: every thread brings its chunk of the next kGroup; the total of `chunks` of them
// goes on, in every thread. `shared` holds kGroup floats.
CANON float group_chunks_folded(bool is_first, float total, float chunk, int chunks, VOX_SHARED_POINTER float* shared,
                                int local) {
  VOX_BARRIER();
  shared[local] = chunk;
  VOX_BARRIER();
  for (int i = 0; i < chunks; ++i) total = chunk_folded(is_first && i == 0, total, shared[i]);
  return total;
}

// How many chunks of `width` terms a round has that starts at chunk `first`.
CANON int chunks_of_round(int32_t width, int32_t first) {
  const int32_t left = (width - 1) / (int32_t)kChunk + 1 - first;
  return left < kGroup ? left : kGroup;
}

}  // namespace VOX_ISA
}  // namespace vox
