// Several rows times Q8_0 weights on tensor cores: int8 products with int32 sums, which are exact in any order,
// then each block's scale and C128's chunks in their order, as in grid/quantised.h.
//
// A group makes kM x kN outputs: its four warps lie kAcrossM x kAcrossN, each has kTilesM x kTilesN tiles of 16 rows
// and 8 outputs. Codes of both sides come through shared memory, some stages of kBlocks blocks ahead.

namespace vox {
namespace VOX_ISA {

struct TileArgs {  // group (outputs of one of three weights, rows)
  int32_t outputs0, outputs1, outputs2;
  int32_t columns;
  int32_t rows;
  int32_t mode;  // kStore or kAddResidual
};

enum { kExpected = 16 };  // stages of weights that are asked for in advance

struct alignas(16) Bytes16 {
  uint32_t words[4];
};

// To shared memory without a register, some time before `arrived_but`.
template <int Bytes>
CANON void sent(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  const uint32_t at = (uint32_t)__cvta_generic_to_shared(to);
  if (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(at), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(at), "l"(from), "n"(Bytes) : "memory");
#else
  for (int i = 0; i < Bytes; ++i) ((uint8_t*)to)[i] = ((const uint8_t*)from)[i];
#endif
}
CANON void end_of_stage() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}
template <int Stages>
CANON void arrived_but() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_group %0;" ::"n"(Stages) : "memory");
#endif
}

// What a lane holds of a tile of 16 rows, or of 8 outputs, and a block: eight codes of two rows, or of an output.
// The tensor core takes them for other columns than they are of, the same ones on both sides, and the sum of a block
// is the same in any order.
struct TileRows {
  uint32_t words[4];
};
struct alignas(8) TwoWords {
  uint32_t words[2];
};
CANON TileRows tile_rows(const uint8_t* rows, int pitch) {
  const int lane = VOX_LOCAL % 32;
  const uint8_t* first = rows + lane / 4 * pitch + lane % 4 * 8;
  const TwoWords one = *(const TwoWords*)first, other = *(const TwoWords*)(first + 8 * pitch);
  return {{one.words[0], other.words[0], one.words[1], other.words[1]}};
}
CANON TwoWords tile_outputs(const uint8_t* outputs) {
  const int lane = VOX_LOCAL % 32;
  return *(const TwoWords*)(outputs + lane % 4 / 2 * 128 + lane / 4 * 16 + lane % 2 * 8);
}

// The four integer dots of a lane, as floats: rows lane / 4 and 8 more, outputs 2 (lane % 4) and one more. The sum
// starts at the bits of 1.5 * 2^23, so that it reads as that float plus the sum: |sum| is below 2^22.
struct FourDots {
  float values[4];
};
CANON FourDots tile_dots(const TileRows& a, const TwoWords& b, const uint8_t* rows, int pitch, const uint8_t* outputs) {
  const int32_t base = 0x4B400000;
  int32_t c[4];
#if defined(__CUDA_ARCH__)
  (void)rows, (void)pitch, (void)outputs;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]), "r"(base));
#else
  (void)a, (void)b;
  const int lane = VOX_LOCAL % 32;
  for (int i = 0; i < 4; ++i) {
    const uint8_t* row = rows + (lane / 4 + i / 2 * 8) * pitch;
    const uint8_t* output = outputs + (lane % 4 * 2 + i % 2) * 16;
    c[i] = base;
    for (int k = 0; k < 32; ++k)
      c[i] += (int32_t)(int8_t)row[k] * (int32_t)(int8_t)output[k / 16 * 128 + k % 16];
  }
#endif
  FourDots to;
#pragma unroll
  for (int i = 0; i < 4; ++i) to.values[i] = f_sub(f_from(c[i]), f_from(base));
  return to;
}

// What a group makes: which of the weights side by side, which `N` of its outputs, which `M` rows. Groups that run at
// the same time are of kBand tiles of rows, so that weights which the second cache can't hold are read once for them.
enum { kBand = 8 };
struct TilePlace {
  int which;
  int64_t group, rows;
};
template <int M, int N>
CANON TilePlace tile_place(const TileArgs& args) {
  const int64_t groups0 = (args.outputs0 + N - 1) / N, groups1 = (args.outputs1 + N - 1) / N;
  const int64_t across = groups0 + groups1 + (args.outputs2 + N - 1) / N, high = (args.rows + M - 1) / M;
  const int64_t index = VOX_GROUP_Y * across + VOX_GROUP_X, band = index / (kBand * across);
  const int64_t left = high - band * kBand, tall = left < kBand ? left : kBand, inside = index - band * kBand * across;
  const int64_t group = inside / tall, rows = band * kBand + inside % tall;
  if (group < groups0) return {0, group, rows};
  if (group < groups0 + groups1) return {1, group - groups0, rows};
  return {2, group - groups0 - groups1, rows};
}

struct TileIn {
  const int8_t* codes;
  const float* scales;
  const Piece *w0, *w1, *w2;
  const uint16_t *d0, *d1, *d2;
  const float* residual;
  float *out0, *out1, *out2;
  int32_t *faults0, *faults1, *faults2;
};

template <int AcrossM, int AcrossN, int TilesM, int TilesN, int Blocks, int Stages>
struct Tiles {
  enum {
    kM = AcrossM * TilesM * 16,
    kN = AcrossN * TilesN * 8,
    pitch = Blocks * 32 + 32,  // of a row's codes: four rows read different banks
    codes_bytes = kM * pitch,
    weight_bytes = kN * Blocks * 32,
    x_scale_bytes = kM * Blocks * 4,
    weight_scale_bytes = kN * Blocks * 2,
    stage = codes_bytes + weight_bytes + x_scale_bytes + weight_scale_bytes,
    all = stage * Stages / 16,
  };

  template <class E>
  struct alignas(Blocks * sizeof(E)) Several {
    E values[Blocks];
  };

  struct Place {
    const Piece* weight;
    const uint16_t* d;
    int64_t n, row;  // the first of the group
    int32_t blocks;
  };

  enum {
    kOfRows = (kM * Blocks * 2 + kGroup - 1) / kGroup,     // pieces a thread sends in a stage
    kOfWeights = (kN * Blocks * 2 + kGroup - 1) / kGroup,
    kOfScales = (kM * Blocks + kGroup - 1) / kGroup,
  };
  // What a thread sends of the first stage; of the next one, the same further on.
  struct Sends {
    const int8_t* codes[kOfRows];
    const float* scales[kOfScales];
    const Piece* weights[kOfWeights];
    const uint16_t* d;
  };

  CANON void find(const TileIn& in, const TileArgs& args, const Place& at, Sends& to) {
#pragma unroll
    for (int s = 0; s < kOfRows; ++s) {
      const int32_t i = VOX_LOCAL + s * kGroup;
      const int64_t row = at.row + i / (Blocks * 2), from = row < args.rows ? row : args.rows - 1;
      to.codes[s] = in.codes + from * args.columns + i % (Blocks * 2) * 16;
    }
#pragma unroll
    for (int s = 0; s < kOfScales; ++s) {
      const int32_t i = VOX_LOCAL + s * kGroup;
      const int64_t row = at.row + i / Blocks, from = row < args.rows ? row : args.rows - 1;
      to.scales[s] = in.scales + from * at.blocks + i % Blocks;
    }
#pragma unroll
    for (int s = 0; s < kOfWeights; ++s) {
      const int32_t i = VOX_LOCAL + s * kGroup;
      to.weights[s] = at.weight + piece_at(at.n + i / (Blocks * 16) * 8 + i % 8, i % (Blocks * 16) / 8, 2 * at.blocks);
    }
    to.d = at.d + scale_at(at.n + VOX_LOCAL, 0, at.blocks);
  }
  // `first`: the stage's first block.
  CANON void send_weights(const Place& at, const Sends& from, uint8_t* to, int32_t first) {
#pragma unroll
    for (int s = 0; s < kOfWeights; ++s) {
      const int32_t i = VOX_LOCAL + s * kGroup;
      if (i < kN * Blocks * 2 && 2 * first + i % (Blocks * 16) / 8 < 2 * at.blocks)
        sent<16>(to + codes_bytes + i * 16, from.weights[s] + (int64_t)first * 16);
    }
    // Four blocks' scales of an output lie together, and there is room for four, always.
    if (VOX_LOCAL < kN)
      sent<Blocks * 2>(to + codes_bytes + weight_bytes + x_scale_bytes + VOX_LOCAL * Blocks * 2,
                       from.d + first / 4 * 32 + first % 4);
  }
  CANON void send_rows(const Place& at, const Sends& from, uint8_t* to, int32_t first) {
#pragma unroll
    for (int s = 0; s < kOfRows; ++s) {
      const int32_t i = VOX_LOCAL + s * kGroup;
      if (i < kM * Blocks * 2 && 2 * first + i % (Blocks * 2) < 2 * at.blocks)
        sent<16>(to + i / (Blocks * 2) * pitch + i % (Blocks * 2) * 16, from.codes[s] + (int64_t)first * 32);
    }
#pragma unroll
    for (int s = 0; s < kOfScales; ++s) {
      const int32_t i = VOX_LOCAL + s * kGroup;
      if (i < kM * Blocks && first + i % Blocks < at.blocks)
        sent<4>(to + codes_bytes + weight_bytes + i * 4, from.scales[s] + first);
    }
  }
  // The weights of a stage, on their way into the second cache.
  CANON void expect_weights(const Place& at, int32_t first) {
    if (first + Blocks > at.blocks) return;
    for (int32_t i = VOX_LOCAL; i < kN / 8 * Blocks * 2; i += kGroup)
      expected(at.weight + piece_at(at.n + i / (Blocks * 2) * 8, 2 * first + i % (Blocks * 2), 2 * at.blocks));
  }

  // A chunk of every sum, of which `count` blocks are there.
  template <bool IsWhole>
  CANON void chunk(const uint8_t* here, int row0, int n0, int32_t count, bool is_first,
                   float (&total)[TilesM][TilesN][4]) {
    const int lane = VOX_LOCAL % 32;
    const uint8_t *codes = here + row0 * pitch, *weights = here + codes_bytes + n0 * Blocks * 32;
    const float* x_scales = (const float*)(here + codes_bytes + weight_bytes) + row0 * Blocks;
    const uint16_t* d = (const uint16_t*)(here + codes_bytes + weight_bytes + x_scale_bytes) + n0 * Blocks;
    Several<float> x_scale[TilesM][2];
    Several<uint16_t> weight_scale[TilesN][2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int i = 0; i < TilesM; ++i)
        x_scale[i][q] = *(const Several<float>*)(x_scales + (i * 16 + lane / 4 + q * 8) * Blocks);
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
        weight_scale[j][q] = *(const Several<uint16_t>*)(d + (j * 8 + lane % 4 * 2 + q) * Blocks);
    }
    float p[TilesM][TilesN][4];
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) p[i][j][q] = 0.0f;
#pragma unroll
    for (int k = 0; k < Blocks; ++k) {
      if (!IsWhole && k >= count) continue;
      TwoWords w[TilesN];
      float d_weight[TilesN][2];
#pragma unroll
      for (int j = 0; j < TilesN; ++j) {
        w[j] = tile_outputs(weights + j * Blocks * 256 + k * 256);
#pragma unroll
        for (int q = 0; q < 2; ++q) d_weight[j][q] = f16_widened(weight_scale[j][q].values[k]);
      }
#pragma unroll
      for (int i = 0; i < TilesM; ++i) {
        const uint8_t* rows = codes + i * 16 * pitch + k * 32;
        const TileRows x = tile_rows(rows, pitch);
#pragma unroll
        for (int j = 0; j < TilesN; ++j) {
          const FourDots dots = tile_dots(x, w[j], rows, pitch, weights + j * Blocks * 256 + k * 256);
#pragma unroll
          for (int q = 0; q < 4; ++q)
            p[i][j][q] = f_fma(f_mul(d_weight[j][q % 2], x_scale[i][q / 2].values[k]), dots.values[q], p[i][j][q]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) total[i][j][q] = chunk_folded(is_first, total[i][j][q], p[i][j][q]);
  }

  CANON void run(const TileIn& in, const TileArgs& args, uint8_t* shared) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
    const int row0 = warp % AcrossM * TilesM * 16, n0 = warp / AcrossM * TilesN * 8;
    const TilePlace tile = tile_place<kM, kN>(args);
    const int which = tile.which;
    const Place at = {which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2, which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2,
                      tile.group * kN, tile.rows * kM, args.columns / 32};
    Sends sends;
    find(in, args, at, sends);
    const int32_t rounds = (at.blocks + Blocks - 1) / Blocks;
#pragma unroll
    for (int s = 0; s < Stages - 1; ++s)
      if (s < rounds) send_weights(at, sends, shared + s * stage, s * Blocks);
    for (int s = Stages - 1; s < kExpected && s < rounds; ++s) expect_weights(at, s * Blocks);
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < Stages - 1; ++s) {
      if (s < rounds) send_rows(at, sends, shared + s * stage, s * Blocks);
      end_of_stage();
    }
    float total[TilesM][TilesN][4];
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) total[i][j][q] = 0.0f;
#pragma unroll 1
    for (int32_t round = 0; round < rounds; ++round) {
      arrived_but<Stages - 2>();
      VOX_BARRIER();  // this stage is there, and the one before it is read
      const int32_t next = round + Stages - 1;
      if (next < rounds) {
        uint8_t* to = shared + next % Stages * stage;
        send_weights(at, sends, to, next * Blocks);
        send_rows(at, sends, to, next * Blocks);
        // Of few rows the weights are most of what is read, and come from afar.
        if (kM <= 32) expect_weights(at, (round + kExpected) * Blocks);
      }
      end_of_stage();
      const uint8_t* here = shared + round % Stages * stage;
      if (at.blocks - round * Blocks >= Blocks)
        chunk<true>(here, row0, n0, Blocks, round == 0, total);
      else
        chunk<false>(here, row0, n0, at.blocks - round * Blocks, round == 0, total);
    }
    const int32_t outputs = which == 0 ? args.outputs0 : which == 1 ? args.outputs1 : args.outputs2;
    float* out = which == 0 ? in.out0 : which == 1 ? in.out1 : in.out2;
    int32_t* faults = which == 0 ? in.faults0 : which == 1 ? in.faults1 : in.faults2;
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int64_t row = at.row + row0 + i * 16 + lane / 4 + q / 2 * 8, n = at.n + n0 + j * 8 + lane % 4 * 2 + q % 2;
          if (row >= args.rows || n >= outputs) continue;
          float y = total[i][j][q];
          VOX_WATCH(y, row);
          if (args.mode == kAddResidual) {
            y = f_add(in.residual[row * outputs + n], y);
            if (!is_finite(y)) in.faults1[row] = 1;
          }
          out[row * outputs + n] = y;
        }
  }
};

typedef Tiles<1, 4, 1, 1, 4, 4> Tiles16;   // 16 x 32
typedef Tiles<1, 4, 2, 1, 4, 4> Tiles32;   // 32 x 32
typedef Tiles<2, 2, 1, 1, 4, 5> TilesThin;  // 32 x 16: for few
typedef Tiles<1, 4, 2, 2, 4, 3> TilesWide;  // 32 x 64: for many outputs
typedef Tiles<1, 4, 4, 2, 4, 2> TilesMany;  // 64 x 64
enum { kTiles16 = Tiles16::all, kTiles32 = Tiles32::all, kTilesThin = TilesThin::all, kTilesWide = TilesWide::all, kTilesMany = TilesMany::all };

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_TILES(name, at_once)                                                                                        \
  VOX_KERNEL_AT_ONCE(at_once, vox_step_tiles_q8_0_##name)(                                                                           \
      VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(Piece, w0, 2), VOX_IN(Piece, w1, 3),               \
      VOX_IN(Piece, w2, 4), VOX_IN(uint16_t, d0, 5), VOX_IN(uint16_t, d1, 6), VOX_IN(uint16_t, d2, 7),              \
      VOX_IN(float, residual, 8), VOX_OUT(float, out0, 9), VOX_OUT(float, out1, 10), VOX_OUT(float, out2, 11),      \
      VOX_OUT(int32_t, faults0, 12), VOX_OUT(int32_t, faults1, 13), VOX_OUT(int32_t, faults2, 14),                  \
      VOX_ARGS(TileArgs, 15)) {                                                                                     \
    VOX_SHARED Bytes16 shared[kTiles##name];                                                                        \
    const TileIn in = {codes, scales, w0, w1, w2, d0, d1, d2, residual, out0, out1, out2, faults0, faults1, faults2}; \
    Tiles##name::run(in, args, (uint8_t*)(Bytes16*)shared);                                                         \
  }
VOX_STEP_TILES(16, 4)
VOX_STEP_TILES(32, 3)
VOX_STEP_TILES(Thin, 4)
VOX_STEP_TILES(Wide, 3)
VOX_STEP_TILES(Many, 3)
#undef VOX_STEP_TILES
