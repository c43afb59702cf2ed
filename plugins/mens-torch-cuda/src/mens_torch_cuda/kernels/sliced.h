// Several rows times 16-bit weights, by groups with a chunk for each of their warps: where there are too few outputs
// for groups of larger tiles (row_tiles.h), or too few rows.
//
// A warp makes LanesM * RM rows by 32 / LanesM * RN outputs of every `Slices`th chunk, RM x RN chains a lane. Rows and
// weights come through shared memory, eight columns a stage and one stage ahead: rows term by term in float32, weights
// as words of two columns, output beside output. So a lane reads its terms by quads, and the fmas keep to the
// registers' two banks (chains.h). When each warp has done a chunk, the chunks are folded in their order, all of their
// outputs or a part at a time.

namespace vox {
namespace VOX_ISA {

template <int LanesM, int RM, int RN, int Slices, int Folds>
struct Sliced {
  enum {
    kThreads = 32 * Slices,
    LanesN = 32 / LanesM,
    kM = LanesM * RM,
    kN = LanesN * RN,
    kColumns = 8,                       // of a stage: a piece
    kStages = (int)kChunk / kColumns,   // of a chunk
    rows = kColumns * kM,               // floats of a stage
    stage = rows + kColumns / 2 * kN,   // and words
    kSent = kM / 16,                    // quads of a stage that a lane brings
    kPieces = kN / 32,                  // and pieces
    QuadsM = RM / 4,
    QuadsN = RN / 4,
    kFolded = RN / Folds,                        // of a lane's outputs, at once
    slab = QuadsM * kFolded * 32,                // quads of a warp's chains that are folded at once
    kTotals = (slab + kThreads - 1) / kThreads,  // of a thread
    quads = Slices * (2 * stage / 4 + slab),
  };

  struct Side {
    const float* from_rows[kSent];
    const Piece* from_weight[kPieces];
    Quad held[kSent];
    Piece pieces[kPieces];
  };

  CANON void load_weight(Side& it, int32_t k) {
#pragma unroll
    for (int u = 0; u < kPieces; ++u) it.pieces[u] = streamed(it.from_weight[u] + k);
  }
  CANON void load_rows(Side& it, int32_t k) {
#pragma unroll
    for (int u = 0; u < kSent; ++u) {
      const Piece quad = streamed((const Piece*)(it.from_rows[u] + k));
#pragma unroll
      for (int q = 0; q < 4; ++q) it.held[u].values[q] = f_from((int32_t)quad.words[q]);
    }
  }
  // Two lanes bring the eight terms of a row, since a line of memory is asked for once for both. So that they write to
  // different banks, the later four terms have their rows, or where those are one quad their terms, exchanged in pairs.
  CANON int place_of(int half, int q, int row) {
    return QuadsM == 2 ? (4 * half + q) * kM + (row ^ 16 * half) : ((4 * half + q) ^ half) * kM + row;
  }
  CANON void store(const Side& it, float* to) {
    const int lane = VOX_LOCAL % 32;
#pragma unroll
    for (int u = 0; u < kSent; ++u) {
      const int row = lane / 2 + 16 * u, half = lane % 2;
#pragma unroll
      for (int q = 0; q < 4; ++q) to[place_of(half, q, row)] = it.held[u].values[q];
    }
#pragma unroll
    for (int u = 0; u < kPieces; ++u)
#pragma unroll
      for (int q = 0; q < 4; ++q) to[rows + q * kN + lane + 32 * u] = f_from((int32_t)it.pieces[u].words[q]);
  }

  // Terms `k` and the next one of every chain.
  template <class F>
  CANON void two(float (&p)[RM][RN], int k, const float* of_rows, const float* of_weight) {
    float words[RN];
    quads_of<QuadsN, LanesN * 4>(of_weight + k / 2 * kN, words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[RM], w[RN];
#pragma unroll
      for (int i = 0; i < QuadsM; ++i) quads_of<1, 0>(of_rows + place_of(k / 4, k % 4 + half, i * 16), x + 4 * i);
#pragma unroll
      for (int j = 0; j < RN; ++j)
        w[j] = half == 0 ? F::low((uint32_t)f_bits(words[j])) : F::high((uint32_t)f_bits(words[j]));
      outer(x, w, p);
    }
  }

  template <class F>
  CANON void run(const RowTileIn& in, const TileArgs& args, float* shared) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
    const TilePlace tile = tile_place<kM, kN>(args);
    const int64_t first_output = tile.group * kN, first_row = tile.rows * kM;
    const Piece* weight = tile.which == 0 ? in.w0 : tile.which == 1 ? in.w1 : in.w2;
    const int32_t outputs = tile.which == 0 ? args.outputs0 : tile.which == 1 ? args.outputs1 : args.outputs2;
    const int32_t columns = args.columns, chunks = (columns - 1) / (int32_t)kChunk + 1;
    Side side;
#pragma unroll
    for (int u = 0; u < kPieces; ++u)  // outputs are padded to a multiple of kN
      side.from_weight[u] = weight + piece_at(first_output + lane + 32 * u, 0, columns / 8);
#pragma unroll
    for (int u = 0; u < kSent; ++u) {
      const int64_t row = first_row + lane / 2 + 16 * u;
      side.from_rows[u] = in.x + (row < args.rows ? row : args.rows - 1) * columns + lane % 2 * 4;
    }
    float* staged = shared + warp * 2 * stage;
    Quad* slabs = (Quad*)(shared + Slices * 2 * stage);
    const float *mine = staged + lane / LanesN * 4, *mine_of_weight = staged + rows + lane % LanesN * 4;
    int32_t chunk = warp;
    if (chunk < chunks) load_weight(side, chunk * (int32_t)kChunk);
    wait_for_inputs();
    if (chunk < chunks) {
      load_rows(side, chunk * (int32_t)kChunk);
      store(side, staged);
    }
    warp_barrier();
    Quad total[Folds][kTotals];
    for (int32_t first = 0; first < chunks; first += Slices, chunk += Slices) {
      float p[RM][RN];
#pragma unroll
      for (int i = 0; i < RM; ++i)
#pragma unroll
        for (int j = 0; j < RN; ++j) p[i][j] = 0.0f;
#pragma unroll 1
      for (int32_t s = 0; s < kStages; s += 2) {
#pragma unroll
        for (int turn = 0; turn < 2; ++turn) {
          const int32_t k = chunk * (int32_t)kChunk + (s + turn) * kColumns;
          const int32_t next = turn == 1 && s + 2 == kStages ? (chunk + Slices) * (int32_t)kChunk : k + kColumns;
          if (next < columns) {
            load_rows(side, next);
            load_weight(side, next);
          }
          if (k < columns) {
#pragma unroll
            for (int i = 0; i < kColumns; i += 2) two<F>(p, i, mine + turn * stage, mine_of_weight + turn * stage);
          }
          if (next < columns) store(side, staged + (turn ^ 1) * stage);
          warp_barrier();
        }
      }
#pragma unroll
      for (int f = 0; f < Folds; ++f) {
        VOX_BARRIER();  // what was folded before is read
#pragma unroll
        for (int j = 0; j < kFolded; ++j)
#pragma unroll
          for (int i = 0; i < QuadsM; ++i) {  // exchanged in pairs, as in chains.h
            const int n = f * kFolded + j;
            slabs[warp * slab + (j * QuadsM + i) * 32 + lane] = {
                {p[4 * i + 1][n], p[4 * i][n], p[4 * i + 3][n], p[4 * i + 2][n]}};
          }
        VOX_BARRIER();
#pragma unroll
        for (int u = 0; u < kTotals; ++u) {
          const int e = VOX_LOCAL + u * kThreads;
          if (e >= slab) continue;
#pragma unroll
          for (int c = 0; c < Slices; ++c) {
            if (first + c >= chunks) continue;
            const Quad y = slabs[c * slab + e];
#pragma unroll
            for (int q = 0; q < 4; ++q)
              total[f][u].values[q] = chunk_folded(first == 0 && c == 0, total[f][u].values[q], y.values[q]);
          }
        }
      }
    }
    float* out = tile.which == 0 ? in.out0 : tile.which == 1 ? in.out1 : in.out2;
    int32_t* faults = tile.which == 0 ? in.faults0 : tile.which == 1 ? in.faults1 : in.faults2;
#pragma unroll
    for (int t = 0; t < Folds * kTotals; ++t) {
      const int e = VOX_LOCAL + t % kTotals * kThreads, of = e % 32, i = e / 32 % QuadsM;
      const int j = t / kTotals * kFolded + e / 32 / QuadsM;
      const int64_t n = first_output + j / 4 * LanesN * 4 + of % LanesN * 4 + j % 4;
      if (e >= slab || n >= outputs) continue;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int64_t row = first_row + i * LanesM * 4 + of / LanesN * 4 + (q ^ 1);
        if (row >= args.rows) continue;
        float y = total[t / kTotals][t % kTotals].values[q];
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

typedef Sliced<4, 8, 8, 8, 1> SlicedWide;   // 32 x 64
typedef Sliced<4, 4, 8, 16, 2> SlicedDeep;  // 16 x 64
enum { kSlicedWide = SlicedWide::quads, kSlicedDeep = SlicedDeep::quads };

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_SLICED(suffix, F, name)                                                                            \
  VOX_ASKS(vox_step_tiles_##suffix##_##name, kSliced##name)                                                         \
  VOX_KERNEL_OF(Sliced##name::kThreads, 1, vox_step_tiles_##suffix##_##name)(                                       \
      VOX_IN(float, x, 0), VOX_IN(Piece, w0, 1), VOX_IN(Piece, w1, 2), VOX_IN(Piece, w2, 3),                        \
      VOX_IN(float, residual, 4), VOX_OUT(float, out0, 5), VOX_OUT(float, out1, 6), VOX_OUT(float, out2, 7),        \
      VOX_OUT(int32_t, faults0, 8), VOX_OUT(int32_t, faults1, 9), VOX_OUT(int32_t, faults2, 10),                    \
      VOX_ARGS(TileArgs, 11)) {                                                                                     \
    VOX_ASKED(kSliced##name, shared);                                                                               \
    const RowTileIn in = {x, w0, w1, w2, residual, out0, out1, out2, faults0, faults1, faults2};                    \
    Sliced##name::run<F>(in, args, (float*)(Quad*)shared);                                                          \
  }
VOX_STEP_SLICED(f16, PackedF16, Wide)
VOX_STEP_SLICED(f16, PackedF16, Deep)
VOX_STEP_SLICED(bf16, PackedBf16, Wide)
VOX_STEP_SLICED(bf16, PackedBf16, Deep)
#undef VOX_STEP_SLICED
