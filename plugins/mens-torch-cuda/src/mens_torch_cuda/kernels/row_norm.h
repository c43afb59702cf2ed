// A row normed by the group that multiplies it, in shared memory, and its int8 codes: the bits of the norm's operator
// and of grid/quantised.h.

namespace vox {
namespace VOX_ISA {

enum {
  kNormChunks = 48,  // of a row that it norms
  kNormStaged = kNormChunks * kStride,
  kNormStagedQuads = kNormStaged / 4,
  kNormSumQuads = kNormChunks / 4,
  kNormBlocks = kNormChunks * 4,
  kNormPartials = 2 * kNormChunks * 32,  // at most so many partial sums of a group, [chunks][outputs]
  kNormAhead = kNormPartials + 1536,     // weights of a norm; afterwards partial sums
  kNormAheadQuads = kNormAhead / 4,
  kTwoGroups = 2 * kGroup,
};

// A norm's weights on their way, as many as there is room for: they are no one's output.
CANON void sent_norm(const float* weight, int32_t columns, float* ahead) {
  for (int32_t i = VOX_LOCAL * 4; i < columns && i < kNormAhead; i += kGroup * 4) sent(ahead + i, weight + i);
}

// A chunk's sum of squares, of whole quads: the next `Together` are on their way while as many are added.
template <int Together = 2>
CANON float squares_of(const float* terms, int32_t count) {
  Quad now[Together], then[Together];
  float p = 0.0f;
#pragma unroll
  for (int i = 0; i < Together; ++i)
    if (4 * i < count) then[i] = *(const Quad*)(terms + 4 * i);
#pragma unroll 2
  for (int32_t k = 0; k < count; k += 4 * Together) {
#pragma unroll
    for (int i = 0; i < Together; ++i) {
      now[i] = then[i];
      if (k + 4 * (Together + i) < count) then[i] = *(const Quad*)(terms + k + 4 * (Together + i));
    }
#pragma unroll
    for (int i = 0; i < Together; ++i) {
      if (k + 4 * i >= count) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) p = SumOfSquares::step(now[i].values[j], p);
    }
  }
  return p;
}

// A row is staged chunk by chunk in kStride floats.
CANON float* staged_at(float* staged, int32_t i) { return staged + i / (int32_t)kChunk * kStride + i % (int32_t)kChunk; }

enum { kStagedApart = kGroup * 4 / (int)kChunk * kStride };  // of a thread's quads
struct NormOf {
  float inverse;
  bool is_whole;  // An infinite sum makes every output zero, and would hide: the row is NaN instead.
};
// The row is staged, and what it is normed by is known. `later`: what is asked for when the row is there.
template <class Later>
CANON NormOf staged_row(const float* x, int32_t columns, float eps, float* staged, float* sums, Later later) {
  const int32_t chunks = (columns - 1) / (int32_t)kChunk + 1;
  float* at = staged_at(staged, VOX_LOCAL * 4);
  for (int32_t i = VOX_LOCAL * 4, k = 0; i < columns; i += kGroup * 4, k += kStagedApart) sent_shared(at + k, x + i);
  arrived_all();
  let_next_start();
  VOX_BARRIER();
  later();
  if (VOX_LOCAL < chunks) {
    const int32_t left = columns - VOX_LOCAL * (int32_t)kChunk;
    const float* own = staged + VOX_LOCAL * kStride;
    sums[VOX_LOCAL] = left < (int32_t)kChunk ? squares_of(own, left) : squares_of<4>(own, kChunk);
  }
  VOX_BARRIER();
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t c = 0; c < chunks; c += 4) {
    const Quad some = *(const Quad*)(sums + c);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (c + j < chunks) sum = chunk_folded(c + j == 0, sum, some.values[j]);
  }
  return {norm_inverse(sum, (float)columns, eps), is_finite(sum)};
}

// The normed row in the row's place; the first weights are `ahead`. Ends with a barrier.
CANON void staged_norm(const float* weight, int32_t columns, const NormOf& norm, const float* ahead, float* staged,
                       int32_t* faults, int64_t row, bool watches) {
  bool is_odd = !norm.is_whole;
  float* at = staged_at(staged, VOX_LOCAL * 4);
#pragma unroll 4
  for (int32_t i = VOX_LOCAL * 4, k = 0; i < columns; i += kGroup * 4, k += kStagedApart) {
    const Quad w = i < kNormAhead ? *(const Quad*)(ahead + i) : *(const Quad*)(weight + i);
    Quad q = *(const Quad*)(at + k);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      q.values[j] = norm.is_whole ? normed(q.values[j], norm.inverse, w.values[j]) : f_from(0x7FC00000);
      if (watches) is_odd = is_odd || !is_finite(q.values[j]);
    }
    *(Quad*)(at + k) = q;
  }
  if (watches && is_odd) faults[row] = 1;
  VOX_BARRIER();
}

// The int8 codes of the normed row: a chunk's 128 bytes where its first floats were. Two threads, of one warp, have a
// block. They begin at different quads, which lie in different banks. Ends with a barrier.
CANON void staged_codes(const float* weight, int32_t columns, const NormOf& norm, const float* ahead, float* staged,
                        float* scales, int32_t* magnitudes, int32_t* faults, int64_t row, bool watches) {
  const float inverse = norm.is_whole ? norm.inverse : f_from(0x7FC00000);
  bool is_odd = !norm.is_whole;
  float* own = staged_at(staged, VOX_LOCAL * 16);
  uint32_t* codes = (uint32_t*)(staged + VOX_LOCAL / 8 * kStride) + VOX_LOCAL % 8 * 4;
  int32_t places[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) places[j] = (VOX_LOCAL / 2 + j) % 4;
  enum { apart = kGroup * 16 / (int)kChunk * kStride };
  int32_t i = VOX_LOCAL * 16;
#pragma unroll 1
  for (int32_t round = 0; i - VOX_LOCAL * 16 < columns; i += kGroup * 16, ++round, own += apart, codes += apart) {
    const bool is_there = i < columns;
    int32_t* of_round = magnitudes + (round & 1) * kGroup;
    Quad y[4], w[4];
    int32_t amax = 0;
    if (is_there) {
      if (i < kNormAhead) {
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = *(const Quad*)(ahead + i + 4 * places[j]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = *(const Quad*)(weight + i + 4 * places[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[j] = *(const Quad*)(own + 4 * places[j]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          y[j].values[k] = normed(y[j].values[k], inverse, w[j].values[k]);
          const int32_t magnitude = f_bits(y[j].values[k]) & 0x7FFFFFFF;
          amax = magnitude > amax ? magnitude : amax;
        }
      }
    }
    of_round[VOX_LOCAL] = amax;
    warp_barrier();  // a chunk's threads are in one warp: all of it is read
    if (is_there) {
      const int32_t other = of_round[VOX_LOCAL ^ 1];
      amax = other > amax ? other : amax;
      is_odd = is_odd || amax >= 0x7F800000;
      const float d = activation_scale(amax);
      const float by = has_codes(d) ? activation_inverse(amax) : 0.0f;
      if (VOX_LOCAL % 2 == 0) scales[i / 32] = d;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) word |= ((uint32_t)activation_code(y[j].values[k], by) & 255u) << 8 * k;
        codes[places[j]] = has_codes(d) ? word : 0u;
      }
    }
  }
  if (watches && is_odd) faults[row] = 1;
  VOX_BARRIER();
}

}  // namespace VOX_ISA
}  // namespace vox
