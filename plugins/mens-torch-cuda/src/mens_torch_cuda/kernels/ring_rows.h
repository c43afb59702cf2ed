// Few rows times Q8_0 weights of many outputs on tensor cores. The products and sums are those of tiles.h.
//
// A group makes kM x kN outputs: its warps lie WarpsM x WarpsN, each has TilesM x TilesN tiles of 16 rows and 8
// outputs, and a sum never leaves its lane's registers. A chunk of the columns is a stage of a ring in shared memory;
// what a thread sends there it finds by pointers that step from chunk to chunk. So rows are read once for many
// outputs, and no address is made where codes are multiplied. Columns are whole chunks.

namespace vox {
namespace VOX_ISA {

// As straight_dots, converted: an integer of 22 bits is that float.
CANON FourDots converted_dots(const Bytes16& a, const TwoWords& b, const uint8_t* rows, const uint8_t* outputs) {
#if defined(__CUDA_ARCH__)
  (void)rows, (void)outputs;
  int32_t c[4];
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %10, %10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a.words[0]), "r"(a.words[1]), "r"(a.words[2]), "r"(a.words[3]), "r"(b.words[0]), "r"(b.words[1]), "r"(0));
  FourDots to;
#pragma unroll
  for (int i = 0; i < 4; ++i) to.values[i] = (float)c[i];
  return to;
#else
  return straight_dots(a, b, rows, outputs);
#endif
}

template <int WarpsM, int WarpsN, int TilesM, int TilesN, int Stages>
struct RingRows {
  enum {
    kBlocks = 4,  // of a chunk
    kWarps = WarpsM * WarpsN,
    kThreads = kWarps * 32,
    kM = WarpsM * TilesM * 16,
    kN = WarpsN * TilesN * 8,
    kTall = kM / 16,   // tiles of rows
    kEights = kN / 8,  // of outputs
    // Bytes of a chunk: codes and scales of eight outputs, and of sixteen rows.
    kCodes = 8 * (int)kChunk,
    kScales = 8 * kBlocks * 2,
    kRowCodes = 16 * (int)kChunk,
    kRowScales = 16 * kBlocks * 4,
    scales_at = kEights * kCodes,  // of a stage
    rows_at = scales_at + kEights * kScales,
    row_scales_at = rows_at + kTall * kRowCodes,
    stage = row_scales_at + kTall * kRowScales,
    all = Stages * stage / 16,  // quads
    // Pieces of sixteen bytes of a stage that a thread sends.
    kOfCodes = (kEights * kCodes / 16 + kThreads - 1) / kThreads,
    kOfScales = (kEights * kScales / 16 + kThreads - 1) / kThreads,
    kOfRowCodes = (kTall * kRowCodes / 16 + kThreads - 1) / kThreads,
    kOfRowScales = (kTall * kRowScales / 16 + kThreads - 1) / kThreads,
  };

  struct Place {
    const uint8_t *w, *w_scales, *x, *x_scales;
    int32_t first_eight, last_eight, first_tile, last_tile, chunks;
  };
  // What a thread sends of the next chunk of one kind: runs of `Bytes` bytes, each of eight outputs or sixteen rows,
  // that lie `Apart` bytes from those of the next chunk. Of outputs or rows that are not there, the last ones.
  template <int Count, int Runs, int Bytes, int Apart>
  struct Pieces {
    const uint8_t* from[Count];
    CANON void find(Pieces& it, const uint8_t* all, int32_t first, int32_t last, int32_t chunks) {
#pragma unroll
      for (int u = 0; u < Count; ++u) {
        const int i = VOX_LOCAL + u * kThreads, run = i / (Bytes / 16), of = first + run;
        it.from[u] = all + (int64_t)(of < last ? of : last) * chunks * Apart + i % (Bytes / 16) * 16;
      }
    }
    CANON void send(Pieces& it, uint8_t* to) {
#pragma unroll
      for (int u = 0; u < Count; ++u) {
        const int i = VOX_LOCAL + u * kThreads;
        if ((u + 1) * kThreads <= Runs * Bytes / 16 || i < Runs * Bytes / 16) sent<16>(to + i * 16, it.from[u]);
        it.from[u] += Apart;
      }
    }
  };
  struct Sends {
    Pieces<kOfCodes, kEights, kCodes, kCodesApart> codes;
    Pieces<kOfScales, kEights, kScales, kScalesApart> scales;
    Pieces<kOfRowCodes, kTall, kRowCodes, kRowCodes> row_codes;
    Pieces<kOfRowScales, kTall, kRowScales, kRowScales> row_scales;
  };
  CANON void send_weights(Sends& from, uint8_t* to) {
    from.codes.send(from.codes, to);
    from.scales.send(from.scales, to + scales_at);
  }
  CANON void send_rows(Sends& from, uint8_t* to) {
    from.row_codes.send(from.row_codes, to + rows_at);
    from.row_scales.send(from.row_scales, to + row_scales_at);
  }

  // A chunk of every sum, added to it.
  CANON void chunk(const uint8_t* here, int tile0, int eight0, float (&total)[TilesM][TilesN][4]) {
    const int lane = VOX_LOCAL % 32;
    const uint8_t *rows = here + rows_at + tile0 * kRowCodes, *outputs = here + eight0 * kCodes;
    Quad x_scales[TilesM][2];
    Bytes16 w_scales[TilesN];  // [two outputs][blocks]
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int q = 0; q < 2; ++q)
        x_scales[i][q] = *(const Quad*)(here + row_scales_at + (tile0 + i) * kRowScales + (q * 8 + lane / 4) * 16);
#pragma unroll
    for (int j = 0; j < TilesN; ++j)
      w_scales[j] = *(const Bytes16*)(here + scales_at + (eight0 + j) * kScales + lane % 4 * 16);
    float p[TilesM][TilesN][4];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      Bytes16 x[TilesM];
#pragma unroll
      for (int i = 0; i < TilesM; ++i) x[i] = *(const Bytes16*)(rows + i * kRowCodes + b * 512 + lane * 16);
#pragma unroll
      for (int j = 0; j < TilesN; ++j) {
        const uint8_t* eight = outputs + j * kCodes + b * 256;
        const TwoWords w = tile_outputs(eight);
        float d[2];
#pragma unroll
        for (int q = 0; q < 2; ++q) d[q] = f16_widened(w_scales[j].words[2 * q + b / 2] >> (b % 2 * 16) & 0xFFFFu);
#pragma unroll
        for (int i = 0; i < TilesM; ++i) {
          const FourDots dots = converted_dots(x[i], w, rows + i * kRowCodes + b * 512, eight);
#pragma unroll
          for (int q = 0; q < 4; ++q)
            p[i][j][q] =
                f_fma(f_mul(d[q % 2], x_scales[i][q / 2].values[b]), dots.values[q], b == 0 ? 0.0f : p[i][j][q]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) total[i][j][q] = f_add(total[i][j][q], p[i][j][q]);
  }

  CANON void run(const TileIn& in, const TileArgs& args, uint8_t* shared) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
    const int tile0 = warp % WarpsM * TilesM, eight0 = warp / WarpsM * TilesN;
    const TilePlace tile = tile_place<kM, kN>(args);
    const int which = tile.which;
    const int32_t outputs = which == 0 ? args.outputs0 : which == 1 ? args.outputs1 : args.outputs2;
    const int64_t first_output = tile.group * kN, first_row = tile.rows * kM;
    const Place at = {(const uint8_t*)(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2),
                      (const uint8_t*)(which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2),
                      (const uint8_t*)in.codes,
                      (const uint8_t*)in.scales,
                      (int32_t)(first_output / 8),
                      (outputs - 1) / 8,
                      (int32_t)(first_row / 16),
                      (args.rows - 1) / 16,
                      args.columns / (int32_t)kChunk};
    Sends sends;
    sends.codes.find(sends.codes, at.w, at.first_eight, at.last_eight, at.chunks);
    sends.scales.find(sends.scales, at.w_scales, at.first_eight, at.last_eight, at.chunks);
    sends.row_codes.find(sends.row_codes, at.x, at.first_tile, at.last_tile, at.chunks);
    sends.row_scales.find(sends.row_scales, at.x_scales, at.first_tile, at.last_tile, at.chunks);
#pragma unroll
    for (int s = 0; s < Stages - 1; ++s)
      if (s < at.chunks) send_weights(sends, shared + s * stage);
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < Stages - 1; ++s) {
      if (s < at.chunks) send_rows(sends, shared + s * stage);
      end_of_stage();
    }
    // -0 plus the first chunk's sum is that sum, whatever its bits.
    float total[TilesM][TilesN][4];
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) total[i][j][q] = -0.0f;
    int32_t s = 0, free = Stages - 1;
#pragma unroll 1
    for (int32_t c = 0; c < at.chunks; ++c) {
      arrived_but<Stages - 2>();
      VOX_BARRIER();  // this chunk is there, and the one before it is read
      if (c + Stages - 1 < at.chunks) {
        send_weights(sends, shared + free * stage);
        send_rows(sends, shared + free * stage);
      }
      end_of_stage();
      chunk(shared + s * stage, tile0, eight0, total);
      free = s;
      s = s + 1 == Stages ? 0 : s + 1;
    }
    float* out = which == 0 ? in.out0 : which == 1 ? in.out1 : in.out2;
    int32_t* faults = which == 0 ? in.faults0 : which == 1 ? in.faults1 : in.faults2;
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          const int64_t row = first_row + (tile0 + i) * 16 + lane / 4 + q / 2 * 8;
          const int64_t n = first_output + (eight0 + j) * 8 + lane % 4 * 2 + q % 2;
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

// Name, warps and each warp's tiles (rows, outputs), stages.
#define VOX_RING_ROWS(name, WarpsM, WarpsN, TilesM, TilesN, Stages)        \
  typedef RingRows<WarpsM, WarpsN, TilesM, TilesN, Stages> RingRows##name; \
  enum { kRingRows##name = RingRows##name::all };
VOX_RING_ROWS(16x64, 1, 4, 1, 2, 4)
VOX_RING_ROWS(32x64, 1, 4, 2, 2, 5)
VOX_RING_ROWS(64x64, 2, 2, 2, 4, 4)
#undef VOX_RING_ROWS

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_RING_ROWS(name, at_once)                                                                           \
  VOX_ASKS(vox_step_tiles_q8_0_##name, kRingRows##name)                                                             \
  VOX_KERNEL_AT_ONCE(at_once, vox_step_tiles_q8_0_##name)(                                                          \
      VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(Piece, w0, 2), VOX_IN(Piece, w1, 3),               \
      VOX_IN(Piece, w2, 4), VOX_IN(uint16_t, d0, 5), VOX_IN(uint16_t, d1, 6), VOX_IN(uint16_t, d2, 7),              \
      VOX_IN(float, residual, 8), VOX_OUT(float, out0, 9), VOX_OUT(float, out1, 10), VOX_OUT(float, out2, 11),      \
      VOX_OUT(int32_t, faults0, 12), VOX_OUT(int32_t, faults1, 13), VOX_OUT(int32_t, faults2, 14),                  \
      VOX_ARGS(TileArgs, 15)) {                                                                                     \
    VOX_ASKED(kRingRows##name, shared);                                                                             \
    const TileIn in = {codes, scales, w0, w1, w2, d0, d1, d2, residual, out0, out1, out2, faults0, faults1, faults2}; \
    RingRows##name::run(in, args, (uint8_t*)(Quad*)shared);                                                         \
  }
VOX_STEP_RING_ROWS(16x64, 5)
VOX_STEP_RING_ROWS(32x64, 3)
VOX_STEP_RING_ROWS(64x64, 3)
#undef VOX_STEP_RING_ROWS
