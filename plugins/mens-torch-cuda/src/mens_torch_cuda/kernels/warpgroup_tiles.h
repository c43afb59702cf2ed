// Many rows times Q8_0 weights on Hopper's tensor cores, which take both sides from shared memory: the products and
// sums of tiles.h, for columns that are whole chunks, of codes in the order of core matrices (between.h).
//
// A group is a warpgroup: it makes 64 rows by Halves * 64 outputs. A chunk of both sides is a stage of shared memory,
// some stages ahead; both lie there as they lie in memory, sixteen columns of eight rows in 128 bytes, which is what
// the tensor core reads. A block's sums are integers, made in registers of their own and converted, which is exact.
// Of 18 cycles for 4,096 products the tensor core takes 4.5, conversions, scales and sums the rest (docs/log.md).

namespace vox {
namespace VOX_ISA {

// A block of 64 rows times 64 outputs: what the lane holds are rows lane / 4 and 8 more of its warp's sixteen, outputs
// 8 j + 2 (lane % 4) and one more.
struct BlockDots {
  int32_t values[32];
};
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
// Where a matrix begins, and the bytes from its core matrices to the next along the columns and along the rows
// (PTX ISA, matrix descriptor; no swizzle).
CANON uint64_t matrix_at(uint32_t shared) {
  return (uint64_t)((shared & 0x3FFFFu) >> 4) | (uint64_t)(128 >> 4) << 16 | (uint64_t)(8 * (int)kChunk >> 4) << 32;
}
#define VOX_FOUR(c) "=r"(to.values[c]), "=r"(to.values[c + 1]), "=r"(to.values[c + 2]), "=r"(to.values[c + 3])
#endif
CANON void block_dots(BlockDots& to, const uint8_t* rows, const uint8_t* outputs) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, 0;"
      : VOX_FOUR(0), VOX_FOUR(4), VOX_FOUR(8), VOX_FOUR(12), VOX_FOUR(16), VOX_FOUR(20), VOX_FOUR(24), VOX_FOUR(28)
      : "l"(matrix_at((uint32_t)__cvta_generic_to_shared(rows))),
        "l"(matrix_at((uint32_t)__cvta_generic_to_shared(outputs))));
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
  const int lane = VOX_LOCAL % 32, warp = VOX_LOCAL / 32;
  for (int i = 0; i < 32; ++i) {
    const int row = warp * 16 + lane / 4 + i % 4 / 2 * 8, output = i / 4 * 8 + lane % 4 * 2 + i % 2;
    const uint8_t *a = rows + row / 8 * 8 * (int)kChunk + row % 8 * 16, *b = outputs + output / 8 * 8 * (int)kChunk + output % 8 * 16;
    int32_t sum = 0;
    for (int k = 0; k < 32; ++k) sum += (int32_t)(int8_t)a[k / 16 * 128 + k % 16] * (int32_t)(int8_t)b[k / 16 * 128 + k % 16];
    to.values[i] = sum;
  }
#endif
}
#undef VOX_FOUR
CANON void block_dots_are_there(BlockDots& to) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+r"(to.values[i]));
#else
  (void)to;
#endif
}
// What this thread wrote to shared memory may be read by the tensor cores behind the next barrier.
CANON void shown_to_tensor_cores() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
CANON float float_of(int32_t sum) {
#if defined(__CUDA_ARCH__)
  return __int2float_rn(sum);
#else
  return (float)sum;  // exact: |sum| is below 2^24
#endif
}

struct alignas(16) EightHalves {
  uint16_t values[8];
};

template <int Halves, int Stages>
struct WarpgroupTiles {
  enum {
    kM = 64,
    kN = 64 * Halves,
    kBlocks = 4,  // of a chunk
    kEight = 8 * (int)kChunk,  // bytes of the codes of eight rows, or outputs, and a chunk
    rows_bytes = kM / 8 * kEight,
    weights_bytes = kN / 8 * kEight,
    row_scales_bytes = kM * kBlocks * 4,
    weight_scales_bytes = kN * kBlocks * 2,
    weights = rows_bytes,
    row_scales = weights + weights_bytes,
    weight_scales = row_scales + row_scales_bytes,
    stage = weight_scales + weight_scales_bytes,
    kOfRows = rows_bytes / 16 / kGroup,  // pieces a thread sends in a stage
    kOfWeights = weights_bytes / 16 / kGroup,
    kRowScalePieces = row_scales_bytes / 16,
    kScalePieces = kRowScalePieces + weight_scales_bytes / 16,
    quads = stage * Stages / 16,
  };
  static_assert((int)kScalePieces <= (int)kGroup, "a thread sends one piece of scales at most");

  // What a thread sends of the next stage: its first piece of each side, pieces eights apart, and one of scales.
  struct Sends {
    const uint8_t *rows, *weights, *scales;
    int32_t rows_apart, weights_apart, scales_apart;
  };
  CANON Sends sends(const TileIn& in, const TileArgs& args, const TilePlace& tile) {
    const int which = tile.which, thread = VOX_LOCAL, of_scales = thread - kRowScalePieces;
    const int64_t chunks = args.columns / (int32_t)kChunk, eight = tile.group * (kN / 8);
    const uint8_t* w = (const uint8_t*)(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2);
    const uint8_t* d = (const uint8_t*)(which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2);
    const bool is_of_rows = thread < kRowScalePieces;
    return {(const uint8_t*)in.codes + (tile.rows * (kM / 8) + thread / 64) * chunks * kEight + thread % 64 * 16,
            w + (eight + thread / 64) * chunks * kCodesApart + thread % 64 * 16,
            is_of_rows ? (const uint8_t*)in.scales + (tile.rows * (kM / 16) + thread / 16) * chunks * 256 + thread % 16 * 16
                       : d + (eight + of_scales / 4) * chunks * kScalesApart + of_scales % 4 * 16,
            (int32_t)chunks * (kGroup / 64) * kEight, (int32_t)chunks * (kGroup / 64) * kCodesApart,
            is_of_rows ? 256 : (int32_t)kScalesApart};
  }
  CANON void send(Sends& from, uint8_t* to) {
    const int at = VOX_LOCAL * 16;
#pragma unroll
    for (int i = 0; i < kOfRows; ++i) sent<16>(to + at + i * kGroup * 16, from.rows + i * from.rows_apart);
#pragma unroll
    for (int i = 0; i < kOfWeights; ++i)
      sent<16>(to + weights + at + i * kGroup * 16, from.weights + i * from.weights_apart);
    if (VOX_LOCAL < kScalePieces) sent<16>(to + row_scales + at, from.scales);
    from.rows += kEight;
    from.weights += kCodesApart;
    from.scales += from.scales_apart;
  }

  // A chunk of 64 outputs' sums.
  CANON void half_of(const uint8_t* here, int half, const Quad (&x_scale)[2], float (&total)[32]) {
    const int lane = VOX_LOCAL % 32;
    EightHalves scales[8];  // of two outputs: four blocks each
#pragma unroll
    for (int j = 0; j < 8; ++j)
      scales[j] = *(const EightHalves*)(here + weight_scales + (half * 8 + j) * 64 + lane % 4 * 16);
    float p[32];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      BlockDots dots;
      block_dots(dots, here + b * 256, here + weights + half * 8 * kEight + b * 256);
      float d[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) d[i] = f16_widened(scales[i / 2].values[i % 2 * 4 + b]);
      block_dots_are_there(dots);
#pragma unroll
      for (int i = 0; i < 32; ++i)
        p[i] = f_fma(f_mul(d[i / 4 * 2 + i % 2], x_scale[i % 4 / 2].values[b]), float_of(dots.values[i]), b == 0 ? 0.0f : p[i]);
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) total[i] = f_add(total[i], p[i]);
  }

  CANON void run(const TileIn& in, const TileArgs& args, uint8_t* shared) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
    const TilePlace tile = tile_place<kM, kN>(args);
    const int32_t chunks = args.columns / (int32_t)kChunk;
    wait_for_inputs();
    Sends from = sends(in, args, tile);
    uint8_t *to = shared, *end = shared + Stages * stage;
#pragma unroll
    for (int s = 0; s < Stages - 1; ++s, to += stage) {
      if (s < chunks) send(from, to);
      end_of_stage();
    }
    // A sum starts at -0: added to a first chunk it leaves what that is, +0 and -0 too.
    float total[Halves][32];
#pragma unroll
    for (int h = 0; h < Halves; ++h)
#pragma unroll
      for (int i = 0; i < 32; ++i) total[h][i] = -0.0f;
    const uint8_t* here = shared;
#pragma unroll 1
    for (int32_t c = 0; c < chunks; ++c) {
      arrived_but<Stages - 2>();
      shown_to_tensor_cores();
      VOX_BARRIER();  // this stage is there, and the one before it is read
      if (c + Stages - 1 < chunks) send(from, to);
      end_of_stage();
      to = to + stage == end ? shared : to + stage;
      Quad x_scale[2];
#pragma unroll
      for (int q = 0; q < 2; ++q) x_scale[q] = *(const Quad*)(here + row_scales + (warp * 16 + q * 8 + lane / 4) * 16);
#pragma unroll
      for (int h = 0; h < Halves; ++h) half_of(here, h, x_scale, total[h]);
      here = here + stage == end ? shared : here + stage;
    }
    const int which = tile.which;
    const int32_t outputs = which == 0 ? args.outputs0 : which == 1 ? args.outputs1 : args.outputs2;
    float* out = which == 0 ? in.out0 : which == 1 ? in.out1 : in.out2;
    int32_t* faults = which == 0 ? in.faults0 : which == 1 ? in.faults1 : in.faults2;
    const float* residual = args.mode == kAddResidual ? in.residual : nullptr;
    const bool is_even = outputs % 2 == 0;
    const int64_t n = tile.group * kN + lane % 4 * 2;
#pragma unroll
    for (int q = 0; q < 2; ++q) {
      const int64_t row = tile.rows * kM + warp * 16 + q * 8 + lane / 4, first = row * outputs + n;
      if (row >= args.rows) continue;
      float seen = 0.0f, seen_sums = 0.0f;  // NaN after an infinity or a NaN
#pragma unroll
      for (int j = 0; j < 8 * Halves; ++j) {
        if (n + j * 8 >= outputs) continue;
        const float* sums = total[j / 8] + j % 8 * 4 + q * 2;
        const bool is_pair = is_even || n + j * 8 + 1 < outputs;
        TwoFloats y = {{sums[0], is_pair ? sums[1] : 0.0f}};
#pragma unroll
        for (int i = 0; i < 2; ++i) seen = f_fma(y.values[i], 0.0f, seen);
        if (residual != nullptr) {
          const TwoFloats x = two_at(residual + first + j * 8, is_even, is_pair);
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            y.values[i] = f_add(x.values[i], y.values[i]);
            seen_sums = f_fma(y.values[i], 0.0f, seen_sums);
          }
        }
        put_two(out + first + j * 8, y, is_even, is_pair);
      }
      if (!is_finite(seen)) faults[row] = 1;
      if (!is_finite(seen_sums)) in.faults1[row] = 1;
    }
  }
};

typedef WarpgroupTiles<2, 4> WarpgroupTilesWide;  // 64 x 128
typedef WarpgroupTiles<1, 4> WarpgroupTilesHalf;  // 64 x 64: for few groups
enum { kWarpgroupWide = WarpgroupTilesWide::quads, kWarpgroupHalf = WarpgroupTilesHalf::quads };

}  // namespace VOX_ISA
}  // namespace vox

// Weights are padded to whole tiles.
#define VOX_STEP_WARPGROUP(name, at_once)                                                                           \
  VOX_ASKS(vox_step_tiles_q8_0_Warpgroup##name, kWarpgroup##name)                                                   \
  VOX_KERNEL_AT_ONCE(at_once, vox_step_tiles_q8_0_Warpgroup##name)(                                                 \
      VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(Piece, w0, 2), VOX_IN(Piece, w1, 3),               \
      VOX_IN(Piece, w2, 4), VOX_IN(uint16_t, d0, 5), VOX_IN(uint16_t, d1, 6), VOX_IN(uint16_t, d2, 7),              \
      VOX_IN(float, residual, 8), VOX_OUT(float, out0, 9), VOX_OUT(float, out1, 10), VOX_OUT(float, out2, 11),      \
      VOX_OUT(int32_t, faults0, 12), VOX_OUT(int32_t, faults1, 13), VOX_OUT(int32_t, faults2, 14),                  \
      VOX_ARGS(TileArgs, 15)) {                                                                                     \
    VOX_ASKED(kWarpgroup##name, shared);                                                                            \
    const TileIn in = {codes, scales, w0, w1, w2, d0, d1, d2, residual, out0, out1, out2, faults0, faults1, faults2}; \
    WarpgroupTiles##name::run(in, args, (uint8_t*)(Quad*)shared);                                                   \
  }
VOX_STEP_WARPGROUP(Wide, 2)
VOX_STEP_WARPGROUP(Half, 3)
#undef VOX_STEP_WARPGROUP
