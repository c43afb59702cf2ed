// Products of which one side is thin, as an adapter's are: up to kThin outputs beside one another, whose sums go over
// many terms. Four warps make four chunks side by side; they are folded in their order.

namespace vox {
namespace VOX_ISA {

enum {
  kThin = 8,
  kThinRows = 32,  // of a group
  kThinWeights = 4 * (int)kChunk * kThin / 4,  // quads: a chunk for each warp
  kThinSums = 4 * kThin * kThinRows,
  kThinProducts = 4 * kThin * kGroup / 4,  // quads
};

struct ThinArgs {  // group (kThin outputs, kThinRows rows)
  int32_t rows;
  int32_t terms;    // a multiple of four
  int32_t outputs;
};

// Terms [begin, begin + count) of kThin outputs, as [term][kThin]: those of `outputs` that are there, else zeros.
template <bool IsTermFirst>
CANON void thin_staged(const float* from, int64_t stride, int32_t begin, int32_t count, int32_t outputs, float* to) {
  for (int i = VOX_LOCAL % 32; i < (int)kChunk * kThin; i += 32) {
    const int k = IsTermFirst ? i / kThin : i % (int)kChunk, t = IsTermFirst ? i % kThin : i / (int)kChunk;
    const int64_t at = IsTermFirst ? (begin + k) * stride + t : t * stride + begin + k;
    to[k * kThin + t] = k < count && t < outputs ? from[at] : 0.0f;
  }
}

// Rows of x with a weight that lies output by output, or term by term.
template <bool IsTermFirst>
CANON void thin_product(const float* x, const float* weight, float* out, int32_t* faults, const ThinArgs& args,
                        float* staged, float* partials) {
  const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
  const int64_t first_row = VOX_GROUP_Y * kThinRows, output = VOX_GROUP_X * kThin;
  const int64_t row = first_row + lane < args.rows ? first_row + lane : args.rows - 1;
  const int32_t chunks = (args.terms - 1) / (int32_t)kChunk + 1;
  const float* of_row = x + row * args.terms;
  float* weights = staged + warp * (int)kChunk * kThin;
  float total[2] = {0.0f, 0.0f};
  for (int32_t round = 0; round < chunks; round += 4) {
    const int32_t begin = (round + warp) * (int32_t)kChunk, left = args.terms - begin;
    const int32_t count = left < (int32_t)kChunk ? left : (int32_t)kChunk;
    thin_staged<IsTermFirst>(weight + output * (IsTermFirst ? 1 : args.terms), IsTermFirst ? args.outputs : args.terms,
                             begin, count, (int32_t)(args.outputs - output), weights);
    VOX_BARRIER();  // and the last round's sums are folded
    float p[kThin];
#pragma unroll
    for (int t = 0; t < kThin; ++t) p[t] = 0.0f;
#pragma unroll 8
    for (int32_t k = 0; k < count; k += 4) {
      const Quad terms = *(const Quad*)(of_row + begin + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const Quad low = *(const Quad*)(weights + (k + j) * kThin), high = *(const Quad*)(weights + (k + j) * kThin + 4);
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          p[t] = f_fma(terms.values[j], low.values[t], p[t]);
          p[t + 4] = f_fma(terms.values[j], high.values[t], p[t + 4]);
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kThin; ++t) partials[(warp * kThin + t) * kThinRows + lane] = p[t];
    VOX_BARRIER();
    const int32_t some = chunks - round < 4 ? chunks - round : 4;
    for (int i = 0; i < 2; ++i)
      for (int32_t c = 0; c < some; ++c)
        total[i] = chunk_folded(round + c == 0, total[i], partials[c * kThin * kThinRows + VOX_LOCAL + i * kGroup]);
  }
  for (int i = 0; i < 2; ++i) {
    const int at = VOX_LOCAL + i * kGroup;
    const int64_t r = first_row + at % kThinRows, t = output + at / kThinRows;
    if (r >= args.rows || t >= args.outputs) continue;
    out[r * args.outputs + t] = total[i];
    VOX_WATCH(total[i], r);
  }
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_THIN(name, IsTermFirst)                                                                                  \
  VOX_KERNEL(name)(VOX_IN(float, x, 0), VOX_IN(float, weight, 1), VOX_OUT(float, out, 2), VOX_OUT(int32_t, faults, 3), \
                   VOX_ARGS(ThinArgs, 4)) {                                                                          \
    VOX_SHARED Quad staged[kThinWeights];                                                                            \
    VOX_SHARED float partials[kThinSums];                                                                            \
    thin_product<IsTermFirst>(x, weight, out, faults, args, (float*)(Quad*)staged, (float*)partials);                \
  }
VOX_THIN(vox_thin_forth, false)
VOX_THIN(vox_thin_back, true)
#undef VOX_THIN

// vox_example_products with kThin tall ones a group, four columns a lane: its arguments, but for the tiles.
VOX_KERNEL(vox_thin_products)(VOX_IN(float, tall, 0), VOX_IN(float, wide, 1), VOX_IN(int32_t, starts, 2),
                              VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(ProductsArgs, 5)) {
  VOX_SHARED Quad staged[kThinWeights];
  VOX_SHARED Quad partials[kThinProducts];
  const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
  const int64_t example = VOX_GROUP_Y / args.tiles, first = VOX_GROUP_Y % args.tiles * kThin;
  const int64_t column = VOX_GROUP_X * kGroup + lane * 4, from = column < args.wide ? column : args.wide - 4;
  const int32_t begin = starts[example], end = starts[example + 1], chunks = (end - begin + (int32_t)kChunk - 1) / (int32_t)kChunk;
  float *weights = (float*)(Quad*)staged + warp * (int)kChunk * kThin, *sums = (float*)(Quad*)partials;
  float total[kThin];
#pragma unroll
  for (int t = 0; t < kThin; ++t) total[t] = 0.0f;
  for (int32_t round = 0; round < chunks; round += 4) {
    const int32_t at = begin + (round + warp) * (int32_t)kChunk, left = end - at;
    const int32_t count = left < (int32_t)kChunk ? left : (int32_t)kChunk;
    thin_staged<true>(tall + first, args.tall, at, count, (int32_t)(args.tall - first), weights);
    VOX_BARRIER();  // and the last round's sums are folded
    Quad p[kThin];
#pragma unroll
    for (int t = 0; t < kThin; ++t) p[t] = {{0.0f, 0.0f, 0.0f, 0.0f}};
    const float* row = wide + at * (int64_t)args.wide + from;
#pragma unroll 8
    for (int32_t k = 0; k < count; ++k) {
      const Quad x = *(const Quad*)(row + (int64_t)k * args.wide);
      const Quad low = *(const Quad*)(weights + k * kThin), high = *(const Quad*)(weights + k * kThin + 4);
#pragma unroll
      for (int q = 0; q < 4; ++q)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          p[t].values[q] = f_fma(low.values[t], x.values[q], p[t].values[q]);
          p[t + 4].values[q] = f_fma(high.values[t], x.values[q], p[t + 4].values[q]);
        }
    }
#pragma unroll
    for (int t = 0; t < kThin; ++t) *(Quad*)(sums + (warp * kThin + t) * kGroup + lane * 4) = p[t];
    VOX_BARRIER();
    const int32_t some = chunks - round < 4 ? chunks - round : 4;
    for (int32_t c = 0; c < some; ++c)
#pragma unroll
      for (int t = 0; t < kThin; ++t)
        total[t] = chunk_folded(round + c == 0, total[t], sums[(c * kThin + t) * kGroup + VOX_LOCAL]);
  }
  const int64_t own = VOX_THREAD_X;
  if (own >= args.wide) return;
  float* made = out + example * args.stride;
#pragma unroll
  for (int t = 0; t < kThin; ++t) {
    if (first + t >= args.tall) continue;
    made[args.is_wide_first != 0 ? own * args.tall + first + t : (first + t) * args.wide + own] = total[t];
    VOX_WATCH(total[t], example);
  }
}
