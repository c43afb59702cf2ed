// Few rows times Q8_0 weights of few outputs on tensor cores: both sides go straight from memory into the registers of the lanes
// that multiply them, and nothing waits for a stage of shared memory. The products and sums are those of tiles.h.
//
// A warp has every `Slices`th chunk of the columns, for kM rows and the kWarpN outputs that its slice shares; each
// code is replaced by the one of the warp's next chunk as soon as it is used. When each slice has done a chunk, the
// chunks are folded in their order through shared memory. Columns are whole chunks.

namespace vox {
namespace VOX_ISA {

CANON TwoWords streamed_two(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  TwoWords to;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to.words[0]), "=r"(to.words[1]) : "l"(from));
  return to;
#else
  return *(const TwoWords*)from;
#endif
}
// A load that stays where it is written.
CANON Bytes16 early_codes(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  Bytes16 to;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3])
               : "l"(from));
  return to;
#else
  return *(const Bytes16*)from;
#endif
}
struct alignas(8) TwoFloats {
  float values[2];
};
CANON TwoFloats early_floats(const float* from) {
#if defined(__CUDA_ARCH__)
  TwoFloats to;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(to.values[0]), "=f"(to.values[1]) : "l"(from));
  return to;
#else
  return *(const TwoFloats*)from;
#endif
}
CANON uint32_t streamed_word(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  uint32_t to;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(to) : "l"(from));
  return to;
#else
  return *(const uint32_t*)from;
#endif
}

// As tile_dots, of operands in registers; `rows` are the block's codes of sixteen rows in the order of tiles,
// `outputs` its codes of eight outputs.
CANON FourDots straight_dots(const Bytes16& a, const TwoWords& b, const uint8_t* rows, const uint8_t* outputs) {
  const int32_t base = 0x4B400000;
  int32_t c[4];
#if defined(__CUDA_ARCH__)
  (void)rows, (void)outputs;
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]), "r"(base));
#else
  (void)a, (void)b;
  const int lane = VOX_LOCAL % 32;
  for (int i = 0; i < 4; ++i) {
    const uint8_t* output = outputs + (lane % 4 * 2 + i % 2) * 16;
    c[i] = base;
    for (int k = 0; k < 32; ++k)
      c[i] += (int32_t)(int8_t)rows[coded_at(lane / 4 + i / 2 * 8, k, 32)] *
              (int32_t)(int8_t)output[k / 16 * 128 + k % 16];
  }
#endif
  FourDots to;
#pragma unroll
  for (int i = 0; i < 4; ++i) to.values[i] = f_sub(f_from(c[i]), f_from(base));
  return to;
}

template <int TilesM, int TilesN, int Slices>
struct FewRows {
  enum {
    kBlocks = 4,  // of a chunk
    kM = TilesM * 16,
    Warps = kGroup / 32 / Slices,  // beside one another
    kWarpN = TilesN * 8,
    kN = Warps * kWarpN,
    kQuads = TilesM * TilesN * Warps,             // of a lane's sums, for all warps of a slice
    kTotals = (kQuads + 3) / 4,                   // quads that a thread folds
    kExpectedRounds = 3,
    all = 2 * Slices * kQuads * 32,  // quads
    kRowTwos = TilesM * 2,
  };

  // Of a chunk: what the lane holds. Scales by halves of a chunk.
  struct Held {
    Bytes16 x[TilesM][kBlocks];
    TwoWords w[TilesN][kBlocks];
    TwoFloats x_scales[kRowTwos][2];
    uint32_t w_scales[TilesN][2][2];  // [half][of two outputs]
  };
  struct Place {
    const uint8_t *w, *w_scales;
    const uint8_t* x;
    const float* x_scales;
    uint32_t of_w[TilesN], of_w_scales[TilesN], of_x[TilesM], of_x_scales[kRowTwos], of_line, of_scale_line;
  };

  CANON void load_weights(const Place& at, Held& to, int32_t chunk, int b) {
#pragma unroll
    for (int j = 0; j < TilesN; ++j) to.w[j][b] = streamed_two(at.w + (at.of_w[j] + (uint32_t)chunk * 1024) + b * 256);
  }
  CANON void load_weight_scales(const Place& at, Held& to, int32_t chunk, int half) {
#pragma unroll
    for (int j = 0; j < TilesN; ++j)
#pragma unroll
      for (int q = 0; q < 2; ++q)
        to.w_scales[j][half][q] = streamed_word(at.w_scales + (at.of_w_scales[j] + (uint32_t)chunk * 64) + q * 8 + half * 4);
  }
  CANON void load_rows(const Place& at, Held& to, int32_t chunk, int b) {
#pragma unroll
    for (int i = 0; i < TilesM; ++i) to.x[i][b] = early_codes(at.x + (at.of_x[i] + (uint32_t)chunk * 2048) + b * 512);
  }
  CANON void load_row_scales(const Place& at, Held& to, int32_t chunk, int half) {
#pragma unroll
    for (int i = 0; i < kRowTwos; ++i)
      to.x_scales[i][half] = early_floats(at.x_scales + (at.of_x_scales[i] + (uint32_t)chunk * 64) + half * 2);
  }
  CANON uint32_t of_lane() {
    const int lane = VOX_LOCAL % 32;
    return (uint32_t)(lane / 4 * 16 + lane % 4 / 2 * 128 + lane % 2 * 8);
  }
  // A chunk of weights, on its way into the second cache: each lane asks for a line of some eight outputs.
  CANON void expect_weights(const Place& at, int32_t chunk) {
    const int lane = VOX_LOCAL % 32;
    if (lane < TilesN * 8) expected(at.w + (at.of_line + (uint32_t)chunk * 1024));
    if (lane < TilesN) expected(at.w_scales + (at.of_scale_line + (uint32_t)chunk * 64));
  }

  // Sums of a chunk; what is used of `held` is replaced by what chunk `next` has, where there is one.
  CANON void chunk(const Place& at, Held& held, int32_t here, int32_t next, bool has_next, float (&p)[TilesM][TilesN][4]) {
    const int lane = VOX_LOCAL % 32;
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) p[i][j][q] = 0.0f;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
      for (int j = 0; j < TilesN; ++j) {
        float d[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) d[q] = f16_widened(held.w_scales[j][b / 2][q] >> (b % 2 * 16) & 0xFFFFu);
#pragma unroll
        for (int i = 0; i < TilesM; ++i) {
          const FourDots dots =
              straight_dots(held.x[i][b], held.w[j][b], at.x + (at.of_x[i] - lane * 16 + here * 2048 + b * 512),
                            at.w + (at.of_w[j] - of_lane() + here * 1024 + b * 256));
#pragma unroll
          for (int q = 0; q < 4; ++q)
            p[i][j][q] = f_fma(f_mul(d[q % 2], held.x_scales[2 * i + q / 2][b / 2].values[b % 2]), dots.values[q], p[i][j][q]);
        }
      }
      if (!has_next) continue;
      load_weights(at, held, next, b);
      load_rows(at, held, next, b);
      if (b % 2 == 1) {
        load_weight_scales(at, held, next, b / 2);
        load_row_scales(at, held, next, b / 2);
      }
    }
  }

  CANON void run(const TileIn& in, const TileArgs& args, Quad* shared) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32, slice = warp / Warps, beside = warp % Warps;
    const TilePlace tile = tile_place<kM, kN>(args);
    const int which = tile.which;
    const int32_t outputs = which == 0 ? args.outputs0 : which == 1 ? args.outputs1 : args.outputs2;
    const int32_t blocks = args.columns / 32, chunks = args.columns / (int32_t)kChunk;
    const int64_t first_output = tile.group * kN, first_row = tile.rows * kM;
    const uint8_t* weight = (const uint8_t*)(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2);
    const uint8_t* d = (const uint8_t*)(which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2);
    const int32_t first_eight = (int32_t)(first_output / 8);
    Place at = {weight + (int64_t)first_eight * blocks * 256, d + (int64_t)first_eight * chunks * 64,
                (const uint8_t*)in.codes, in.scales, {}, {}, {}, {}, 0, 0};
#pragma unroll
    for (int j = 0; j < TilesN; ++j) {
      // Of outputs that are not there, the last eight.
      const int32_t eight = beside * TilesN + j, last = (outputs - 1) / 8 - first_eight;
      const uint32_t from = eight < last ? eight : last;
      at.of_w[j] = from * blocks * 256 + of_lane();
      at.of_w_scales[j] = from * chunks * 64 + lane % 4 * 16;
      if (lane / 8 == j) at.of_line = from * blocks * 256 + lane % 8 * 128;
      if (lane == j) at.of_scale_line = from * chunks * 64;
    }
#pragma unroll
    for (int i = 0; i < TilesM; ++i) {
      const int32_t tile_of = (int32_t)first_row / 16 + i, last = (args.rows - 1) / 16;
      at.of_x[i] = (tile_of < last ? tile_of : last) * args.columns * 16 + lane * 16;
    }
#pragma unroll
    for (int i = 0; i < kRowTwos; ++i) {
      const int32_t tile_of = (int32_t)first_row / 16 + i / 2, last = (args.rows - 1) / 16;
      at.of_x_scales[i] = (tile_of < last ? tile_of : last) * chunks * 64 + (i % 2 * 8 + lane / 4) * 4;
    }
    Held held;
    if (slice < chunks) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) load_weights(at, held, slice, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) load_weight_scales(at, held, slice, half);
#pragma unroll
      for (int r = 1; r <= kExpectedRounds; ++r)
        if (slice + r * Slices < chunks) expect_weights(at, slice + r * Slices);
    }
    wait_for_inputs();
    if (slice < chunks) {
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) load_rows(at, held, slice, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) load_row_scales(at, held, slice, half);
    }
    Quad total[kTotals];
    int32_t half = 0;
#pragma unroll 1
    for (int32_t first = 0; first < chunks; first += Slices) {
      const int32_t here = first + slice;
      float p[TilesM][TilesN][4];
      const int32_t afar = here + (kExpectedRounds + 1) * Slices;
      if (afar < chunks) expect_weights(at, afar);
      if (here < chunks) chunk(at, held, here, here + Slices, here + Slices < chunks, p);
      Quad* made = shared + half * Slices * kQuads * 32;
      half = 1 - half;
      if (here < chunks) {
#pragma unroll
        for (int i = 0; i < TilesM; ++i)
#pragma unroll
          for (int j = 0; j < TilesN; ++j)
            made[(slice * kQuads + beside * TilesM * TilesN + i * TilesN + j) * 32 + lane] = {
                {p[i][j][0], p[i][j][1], p[i][j][2], p[i][j][3]}};
      }
      VOX_BARRIER();
      const int32_t left = chunks - first;
#pragma unroll
      for (int u = 0; u < kTotals; ++u) {
        const int quad = warp + 4 * u;
        if (quad >= kQuads) continue;
#pragma unroll
        for (int s = 0; s < Slices; ++s) {
          if (s >= left) continue;
          const Quad one = made[(s * kQuads + quad) * 32 + lane];
#pragma unroll
          for (int q = 0; q < 4; ++q)
            total[u].values[q] = chunk_folded(first == 0 && s == 0, total[u].values[q], one.values[q]);
        }
      }
    }
    float* out = which == 0 ? in.out0 : which == 1 ? in.out1 : in.out2;
    int32_t* faults = which == 0 ? in.faults0 : which == 1 ? in.faults1 : in.faults2;
#pragma unroll
    for (int u = 0; u < kTotals; ++u) {
      const int quad = warp + 4 * u;
      if (quad >= kQuads) continue;
      const int i = quad % (TilesM * TilesN) / TilesN, j = quad % TilesN, of = quad / (TilesM * TilesN);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int64_t row = first_row + i * 16 + lane / 4 + q / 2 * 8;
        const int64_t n = first_output + of * kWarpN + j * 8 + lane % 4 * 2 + q % 2;
        if (row >= args.rows || n >= outputs) continue;
        float y = total[u].values[q];
        VOX_WATCH(y, row);
        if (args.mode == kAddResidual) {
          y = f_add(in.residual[row * outputs + n], y);
          if (!is_finite(y)) in.faults1[row] = 1;
        }
        out[row * outputs + n] = y;
      }
    }
  }
};

// Name, tiles of sixteen rows, tiles of eight outputs of a warp, slices.
#define VOX_FEW_ROWS(name, TilesM, TilesN, Slices)       \
  typedef FewRows<TilesM, TilesN, Slices> FewRows##name; \
  enum { kFewRows##name = FewRows##name::all };
VOX_FEW_ROWS(16x32, 1, 4, 4)
VOX_FEW_ROWS(32x16, 2, 2, 4)
VOX_FEW_ROWS(32x32, 2, 4, 4)
#undef VOX_FEW_ROWS

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_FEW_ROWS(name, at_once)                                                                            \
  VOX_KERNEL_AT_ONCE(at_once, vox_step_tiles_q8_0_##name)(                                                          \
      VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(Piece, w0, 2), VOX_IN(Piece, w1, 3),               \
      VOX_IN(Piece, w2, 4), VOX_IN(uint16_t, d0, 5), VOX_IN(uint16_t, d1, 6), VOX_IN(uint16_t, d2, 7),              \
      VOX_IN(float, residual, 8), VOX_OUT(float, out0, 9), VOX_OUT(float, out1, 10), VOX_OUT(float, out2, 11),      \
      VOX_OUT(int32_t, faults0, 12), VOX_OUT(int32_t, faults1, 13), VOX_OUT(int32_t, faults2, 14),                  \
      VOX_ARGS(TileArgs, 15)) {                                                                                     \
    VOX_SHARED Quad shared[kFewRows##name];                                                                         \
    const TileIn in = {codes, scales, w0, w1, w2, d0, d1, d2, residual, out0, out1, out2, faults0, faults1, faults2}; \
    FewRows##name::run(in, args, (Quad*)shared);                                                                    \
  }
VOX_STEP_FEW_ROWS(16x32, 3)
VOX_STEP_FEW_ROWS(32x16, 3)
VOX_STEP_FEW_ROWS(32x32, 2)
#undef VOX_STEP_FEW_ROWS
