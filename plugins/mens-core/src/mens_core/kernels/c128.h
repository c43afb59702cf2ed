// The one reduction order, for sums along a row: chunks of 128, a chain of fma in each, the
// chunks added in order. Chunks and rows are computed side by side; each keeps its own chain.
#pragma once
#include "definitions.h"
#include "simd.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

// p_i = chain over x_i[0..count), for Side chains side by side: a chain alone waits for each
// operation's latency.
template <class Step, int Side>
static inline void chains(const float* x, int64_t stride, int64_t count, float* sums) {
  float p[Side];
  for (int i = 0; i < Side; ++i) p[i] = 0.0f;
  for (int64_t k = 0; k < count; ++k)
    for (int i = 0; i < Side; ++i) p[i] = Step::step(x[i * stride + k], p[i]);
  for (int i = 0; i < Side; ++i) sums[i] = p[i];
}

// C128 over x[0..width).
template <class Step>
static float c128_row(const float* x, int64_t width) {
  float total = 0.0f;
  float sums[8];
  int64_t done = 0;
  for (; done + 8 * kChunk <= width; done += 8 * kChunk) {
    chains<Step, 8>(x + done, kChunk, kChunk, sums);
    total = chunk_folded(done == 0, total, sums[0]);
    for (int i = 1; i < 8; ++i) total = f_add(total, sums[i]);
  }
  while (done < width) {
    const int64_t left = width - done;
    const int64_t whole = left / kChunk;
    int64_t side = 1;
    if (whole >= 4) {
      chains<Step, 4>(x + done, kChunk, kChunk, sums);
      side = 4;
    } else if (whole >= 2) {
      chains<Step, 2>(x + done, kChunk, kChunk, sums);
      side = 2;
    } else {
      chains<Step, 1>(x + done, 0, left < kChunk ? left : kChunk, sums);
    }
    for (int64_t i = 0; i < side; ++i) total = chunk_folded(done + i == 0, total, sums[i]);
    done += side * kChunk;
  }
  return total;
}

// C128 over each of eight rows.
template <class Step>
static void c128_eight_rows(const float* x, int64_t width, float* totals) {
  float sums[8];
  for (int64_t done = 0; done < width; done += kChunk) {
    chains<Step, 8>(x + done, width, width - done < kChunk ? width - done : kChunk, sums);
    for (int i = 0; i < 8; ++i) totals[i] = chunk_folded(done == 0, totals[i], sums[i]);
  }
}

}  // namespace VOX_ISA
}  // namespace vox
