// Products of which one side is thin, as an adapter's are: up to kThin outputs beside one another, whose sums go over
// many terms. Four warps make four chunks side by side; they are folded in their order.

namespace vox {
namespace VOX_ISA {

enum {
  kThin = 8,
  kThinRows = 32,  // of a group
  kThinWeights = 4 * (int)kChunk * kThin / 4,  // quads: a chunk for each warp
  kThinSums = 4 * kThin * kThinRows,
  kThinProducts1 = kThin * 32,  // quads: a chunk for each warp, of so many columns a lane
  kThinProducts2 = 2 * kThinProducts1,
  kThinProducts4 = 4 * kThinProducts1,
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

// vox_example_products with kThin tall ones a group and Columns columns a lane: its arguments, but for the tiles.
// Few columns make many groups: an example's rows go by four warps alone.
namespace vox {
namespace VOX_ISA {

template <int Columns>
struct alignas(4 * Columns) Some {
  float values[Columns];
};

template <int Columns>
CANON void thin_products(const float* tall, const float* wide, const int32_t* starts, float* out, int32_t* faults,
                         const ProductsArgs& args, float* staged, float* sums) {
  enum { kWidth = 32 * Columns, kOwn = kThin * kWidth / (int)kGroup };
  const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
  const int64_t example = VOX_GROUP_Y / args.tiles, first = VOX_GROUP_Y % args.tiles * kThin;
  const int64_t column = VOX_GROUP_X * kWidth + lane * Columns, last = args.wide - Columns;
  const int32_t begin = starts[example], end = starts[example + 1], chunks = (end - begin + (int32_t)kChunk - 1) / (int32_t)kChunk;
  const float* from = wide + (column < last ? column : last);
  float* weights = staged + warp * (int)kChunk * kThin;
  float total[kOwn];
#pragma unroll
  for (int t = 0; t < kOwn; ++t) total[t] = 0.0f;
  for (int32_t round = 0; round < chunks; round += 4) {
    const int32_t at = begin + (round + warp) * (int32_t)kChunk, left = end - at;
    const int32_t count = left < (int32_t)kChunk ? left : (int32_t)kChunk;
    thin_staged<true>(tall + first, args.tall, at, count, (int32_t)(args.tall - first), weights);
    VOX_BARRIER();  // and the last round's sums are folded
    Some<Columns> p[kThin];
#pragma unroll
    for (int t = 0; t < kThin; ++t)
#pragma unroll
      for (int q = 0; q < Columns; ++q) p[t].values[q] = 0.0f;
    const float* row = from + at * (int64_t)args.wide;
#pragma unroll 16
    for (int32_t k = 0; k < count; ++k) {
      const Some<Columns> x = *(const Some<Columns>*)(row + (int64_t)k * args.wide);
      const Quad low = *(const Quad*)(weights + k * kThin), high = *(const Quad*)(weights + k * kThin + 4);
#pragma unroll
      for (int q = 0; q < Columns; ++q)
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          p[t].values[q] = f_fma(low.values[t], x.values[q], p[t].values[q]);
          p[t + 4].values[q] = f_fma(high.values[t], x.values[q], p[t + 4].values[q]);
        }
    }
#pragma unroll
    for (int t = 0; t < kThin; ++t) *(Some<Columns>*)(sums + (warp * kThin + t) * kWidth + lane * Columns) = p[t];
    VOX_BARRIER();
    const int32_t some = chunks - round < 4 ? chunks - round : 4;
    for (int32_t c = 0; c < some; ++c)
#pragma unroll
      for (int t = 0; t < kOwn; ++t)
        total[t] = chunk_folded(round + c == 0, total[t], sums[c * kThin * kWidth + t * (int)kGroup + VOX_LOCAL]);
  }
  float* made = out + example * args.stride;
#pragma unroll
  for (int t = 0; t < kOwn; ++t) {
    const int at = t * (int)kGroup + VOX_LOCAL;
    const int64_t one = first + at / kWidth, own = VOX_GROUP_X * kWidth + at % kWidth;
    if (own >= args.wide || one >= args.tall) continue;
    made[args.is_wide_first != 0 ? own * args.tall + one : one * args.wide + own] = total[t];
    VOX_WATCH(total[t], example);
  }
}

struct UpdateArgs {  // group (kUpdateColumns columns, kUpdateRows rows)
  int32_t rows;
  int32_t terms;    // at most Most
  int32_t columns;  // a multiple of four
  float factor;
};

enum { kUpdateColumns = 128, kUpdateRows = 64 };

// y + factor * (u times a weight that lies column by column, or term by term): a product of a few terms, rounded, and
// then vox_add_scaled. Each has flags of its own. A warp has a row, a lane four columns.
template <int Most, bool IsTermFirst>
CANON void thin_update(const float* y, const float* u, const float* weight, float* out, int32_t* product_faults,
                       int32_t* faults, const UpdateArgs& args) {
  const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
  const int64_t column = VOX_GROUP_X * kUpdateColumns + lane * 4;
  if (column >= args.columns) return;
  float w[Most][4];
#pragma unroll
  for (int k = 0; k < Most; ++k)
#pragma unroll
    for (int q = 0; q < 4; ++q)
      w[k][q] = k < args.terms ? weight[IsTermFirst ? k * (int64_t)args.columns + column + q
                                                    : (column + q) * args.terms + k]
                               : 0.0f;
#pragma unroll 4
  for (int i = 0; i < kUpdateRows / 4; ++i) {
    const int64_t row = VOX_GROUP_Y * kUpdateRows + i * 4 + warp;
    if (row >= args.rows) break;
    const int64_t at = row * args.columns + column;
    const Quad before = *(const Quad*)(y + at);
    Quad made = {{0.0f, 0.0f, 0.0f, 0.0f}};
#pragma unroll
    for (int k = 0; k < Most; ++k) {
      if (k >= args.terms) break;
      const float x = u[row * args.terms + k];
#pragma unroll
      for (int q = 0; q < 4; ++q) made.values[q] = f_fma(x, w[k][q], made.values[q]);
    }
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const float v = chunk_folded(true, 0.0f, made.values[q]);
      if (!is_finite(v)) product_faults[row] = 1;
      made.values[q] = scaled_sum(before.values[q], v, args.factor);
      VOX_WATCH(made.values[q], row);
    }
    *(Quad*)(out + at) = made;
  }
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_THIN_PRODUCTS(name, Columns)                                                                         \
  VOX_KERNEL(name)(VOX_IN(float, tall, 0), VOX_IN(float, wide, 1), VOX_IN(int32_t, starts, 2),                   \
                   VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(ProductsArgs, 5)) {             \
    VOX_SHARED Quad staged[kThinWeights];                                                                        \
    VOX_SHARED Quad partials[kThinProducts##Columns];                                                            \
    thin_products<Columns>(tall, wide, starts, out, faults, args, (float*)(Quad*)staged, (float*)(Quad*)partials); \
  }
VOX_THIN_PRODUCTS(vox_thin_products_1, 1)
VOX_THIN_PRODUCTS(vox_thin_products_2, 2)
VOX_THIN_PRODUCTS(vox_thin_products_4, 4)
#undef VOX_THIN_PRODUCTS

#define VOX_THIN_UPDATE(name, Most, IsTermFirst)                                                                  \
  VOX_KERNEL(name)(VOX_IN(float, y, 0), VOX_IN(float, u, 1), VOX_IN(float, weight, 2), VOX_OUT(float, out, 3),    \
                   VOX_OUT(int32_t, product_faults, 4), VOX_OUT(int32_t, faults, 5), VOX_ARGS(UpdateArgs, 6)) {   \
    thin_update<Most, IsTermFirst>(y, u, weight, out, product_faults, faults, args);                              \
  }
VOX_THIN_UPDATE(vox_update_forth_8, 8, false)
VOX_THIN_UPDATE(vox_update_forth_16, 16, false)
VOX_THIN_UPDATE(vox_update_back_8, 8, true)
VOX_THIN_UPDATE(vox_update_back_16, 16, true)
#undef VOX_THIN_UPDATE
