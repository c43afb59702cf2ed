// Several rows times 16-bit weights, by groups of eight warps whose lanes have a chunk for each of their parts.
//
// A part is LanesM by LanesN lanes of a warp. It makes LanesM * RM rows by LanesN * RN outputs of every `Slices`th
// chunk, RM x RN chains a lane: so a lane has as many chains where a group has few outputs as where it has many. Rows
// and weights come through shared memory, eight columns a stage and one stage ahead: rows term by term in float32,
// weights as words of two columns, output beside output. So a lane reads its terms by quads, and the fmas keep to the
// registers' two banks (chains.h). When each part has done a chunk, the chunks are folded in their order, all of their
// outputs or some at a time.

namespace vox {
namespace VOX_ISA {

// `Folds`: in how many steps a lane's outputs are folded. `Columns`: how many columns' fmas stand in the code one behind
// the other; where chains are many, few of them, since warps go through the code each by itself.
template <int LanesM, int LanesN, int RM, int RN, int Folds, int Columns>
struct Sliced {
  enum {
    kWarps = 8,
    kThreads = 32 * kWarps,
    kPart = LanesM * LanesN,  // lanes
    Parts = 32 / kPart,       // of a warp
    Slices = kWarps * Parts,
    kM = LanesM * RM,
    kN = LanesN * RN,
    kColumns = 8,                                 // of a stage: a piece
    Turns = Columns == 2 * kColumns ? 2 : 1,      // stages of a loop
    AtOnce = Columns / Turns,
    kStages = (int)kChunk / kColumns,             // of a chunk
    kHalf = 16,                                   // floats before the later four terms of rows: in other banks
    rows = kColumns * kM + kHalf,                 // floats of a part's stage
    part = rows + kColumns / 2 * kN + kHalf / 2,  // and words: parts are in different banks
    stage = Parts * part,
    kSent = Parts * kM / 16,    // quads of a stage that a lane brings
    kPieces = Parts * kN / 32,  // and pieces
    QuadsM = RM / 4,
    QuadsN = RN / 4,
    kFolded = RN / Folds,                        // of a lane's outputs, at once
    slab = QuadsM * kFolded * 32,                // quads of a warp's chains that are folded at once
    sums = slab / Parts,                         // of a chunk
    kTotals = (sums + kThreads - 1) / kThreads,  // of a thread
    quads = kWarps * (2 * stage / 4 + slab),
  };

  // What a lane brings: quads of rows, pieces of weights, each for one of the parts.
  struct Side {
    const float* from_rows[kSent];
    const Piece* from_weight[kPieces];
    Quad held[kSent];
    Piece pieces[kPieces];
  };
  CANON uint32_t lane_here() { return (uint32_t)VOX_LOCAL % 32; }
  CANON int part_of_rows(int u) { return u / (kM / 16); }
  CANON int row_of(int u) { return (int)(lane_here() / 2) + 16 * (u % (kM / 16)); }
  CANON int part_of_piece(int u) { return (int)((lane_here() + 32 * u) / kN); }
  CANON int output_of(int u) { return (int)((lane_here() + 32 * u) % kN); }

  CANON void find(Side& it, const RowTileIn& in, const TileArgs& args, const TilePlace& tile, int32_t chunk) {
    const Piece* weight = tile.which == 0 ? in.w0 : tile.which == 1 ? in.w1 : in.w2;
    const int32_t outputs = tile.which == 0 ? args.outputs0 : tile.which == 1 ? args.outputs1 : args.outputs2;
    // Outputs are padded to a multiple of 64: what is there is zero, and not stored.
    const int64_t last = ((int64_t)outputs + 63) / 64 * 64 - 1;
#pragma unroll
    for (int u = 0; u < kPieces; ++u) {
      const int64_t n = tile.group * kN + output_of(u);
      it.from_weight[u] = weight + piece_at(n < last ? n : last, (chunk + part_of_piece(u)) * 16, args.columns / 8);
    }
#pragma unroll
    for (int u = 0; u < kSent; ++u) {
      const int64_t row = tile.rows * kM + row_of(u);
      it.from_rows[u] = in.x + (row < args.rows ? row : args.rows - 1) * args.columns +
                        (chunk + part_of_rows(u)) * (int32_t)kChunk + lane_here() % 2 * 4;
    }
  }
  CANON void advance(Side& it, int32_t columns) {
#pragma unroll
    for (int u = 0; u < kPieces; ++u) it.from_weight[u] += columns;  // eight outputs' pieces lie together
#pragma unroll
    for (int u = 0; u < kSent; ++u) it.from_rows[u] += columns;
  }
  // From column `k` of the first part's chunk on, `ahead` of the pointers.
  CANON void load_weight(Side& it, int ahead, int32_t k, int32_t columns) {
#pragma unroll
    for (int u = 0; u < kPieces; ++u)
      if (k + part_of_piece(u) * (int32_t)kChunk < columns) it.pieces[u] = streamed(it.from_weight[u] + ahead);
  }
  CANON void load_rows(Side& it, int ahead, int32_t k, int32_t columns) {
#pragma unroll
    for (int u = 0; u < kSent; ++u) {
      if (k + part_of_rows(u) * (int32_t)kChunk >= columns) continue;
      const Piece quad = streamed((const Piece*)(it.from_rows[u] + ahead));
#pragma unroll
      for (int q = 0; q < 4; ++q) it.held[u].values[q] = f_from((int32_t)quad.words[q]);
    }
  }
  // Two lanes bring the eight terms of a row, since a line of memory is asked for once for both.
  CANON int place_of(int term) { return term * kM + term / 4 * kHalf; }
  CANON void store(const Side& it, float* to) {
#pragma unroll
    for (int u = 0; u < kSent; ++u)
#pragma unroll
      for (int q = 0; q < 4; ++q)
        to[part_of_rows(u) * part + (int)(lane_here() % 2) * (4 * kM + kHalf) + q * kM + row_of(u)] = it.held[u].values[q];
#pragma unroll
    for (int u = 0; u < kPieces; ++u)
#pragma unroll
      for (int q = 0; q < 4; ++q)
        to[part_of_piece(u) * part + rows + q * kN + output_of(u)] = f_from((int32_t)it.pieces[u].words[q]);
  }

  // Two more terms of every chain.
  template <class F>
  CANON void two(float (&p)[RM][RN], const float* of_rows, const float* of_weight) {
    float words[RN];
    quads_of<QuadsN, LanesN * 4>(of_weight, words);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float x[RM], w[RN];
      quads_of<QuadsM, LanesM * 4>(of_rows + half * kM, x);
#pragma unroll
      for (int j = 0; j < RN; ++j)
        w[j] = half == 0 ? F::low((uint32_t)f_bits(words[j])) : F::high((uint32_t)f_bits(words[j]));
      outer(x, w, p);
    }
  }

  // The chunks of a round, of which there are `count`, in their order. Where all of them are there nothing is asked, and
  // they are on their way at once.
  CANON void fold(Quad (&total)[kTotals], const Quad* slabs, bool is_first, int32_t count) {
#pragma unroll
    for (int u = 0; u < kTotals; ++u) {
      const int e = VOX_LOCAL + u * kThreads;
      if (e >= sums) continue;
#pragma unroll
      for (int c = 0; c < Slices; ++c) {
        if (c >= count) continue;
        const Quad y = slabs[c / Parts * slab + e / kPart * 32 + c % Parts * kPart + e % kPart];
#pragma unroll
        for (int q = 0; q < 4; ++q) total[u].values[q] = chunk_folded(is_first && c == 0, total[u].values[q], y.values[q]);
      }
    }
  }

  template <class F>
  CANON void run(const RowTileIn& in, const TileArgs& args, float* shared) {
    const int warp = (int)((uint32_t)VOX_LOCAL / 32), lane = (int)lane_here(), of_part = (int)(lane_here() / kPart);
    const TilePlace tile = tile_place<kM, kN>(args);
    const int32_t columns = args.columns, chunks = (columns - 1) / (int32_t)kChunk + 1;
    int32_t chunk = warp * Parts;  // of the warp's first part
    Side side;
    find(side, in, args, tile, chunk);
    float* staged = shared + warp * 2 * stage;
    Quad* slabs = (Quad*)(shared + kWarps * 2 * stage);
    const float *mine = staged + of_part * part + lane / LanesN % LanesM * 4,
                *mine_of_weight = staged + of_part * part + rows + lane % LanesN * 4;
    load_weight(side, 0, chunk * (int32_t)kChunk, columns);
    wait_for_inputs();
    load_rows(side, 0, chunk * (int32_t)kChunk, columns);
    store(side, staged);
    warp_barrier();
    Quad total[Folds][kTotals];
    for (int32_t first = 0; first < chunks; first += Slices, chunk += Slices) {
      float p[RM][RN];
#pragma unroll
      for (int i = 0; i < RM; ++i)
#pragma unroll
        for (int j = 0; j < RN; ++j) p[i][j] = 0.0f;
#pragma unroll 1
      for (int32_t s = 0; s < kStages; s += Turns) {
#pragma unroll
        for (int turn = 0; turn < Turns; ++turn) {
          const int32_t k = chunk * (int32_t)kChunk + (s + turn) * kColumns;
          const bool is_last = turn + 1 == Turns && s + Turns == kStages;
          const int32_t by = is_last ? (Slices - 1) * (int32_t)kChunk + kColumns : (int)kColumns;
          const int here = (Turns == 2 ? turn : (int)s % 2) * stage;
          const bool goes_on = k + by < columns;
          // Where a loop has two stages, the pointers go on once.
          const int ahead = turn + 1 < Turns ? (int)kColumns : 0;
          if (ahead == 0) advance(side, is_last ? by + (Turns - 1) * kColumns : Turns * kColumns);
          if (goes_on) {
            load_rows(side, ahead, k + by, columns);
            load_weight(side, ahead, k + by, columns);
          }
          if (k + of_part * (int32_t)kChunk < columns) {
#pragma unroll 1
            for (int i = 0; i < kColumns; i += AtOnce) {
              const float *of_rows = mine + here + place_of(i), *of_weight = mine_of_weight + here + i / 2 * kN;
#pragma unroll
              for (int t = 0; t < AtOnce; t += 2) two<F>(p, of_rows + place_of(t), of_weight + t / 2 * kN);
            }
          }
          if (goes_on) store(side, staged + stage - here);
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
        if (first + Slices <= chunks)
          fold(total[f], slabs, first == 0, (int32_t)Slices);
        else
          fold(total[f], slabs, first == 0, chunks - first);
      }
    }
    const int32_t outputs = tile.which == 0 ? args.outputs0 : tile.which == 1 ? args.outputs1 : args.outputs2;
    float* out = tile.which == 0 ? in.out0 : tile.which == 1 ? in.out1 : in.out2;
    int32_t* faults = tile.which == 0 ? in.faults0 : tile.which == 1 ? in.faults1 : in.faults2;
#pragma unroll
    for (int t = 0; t < Folds * kTotals; ++t) {
      const int e = VOX_LOCAL + t % kTotals * kThreads, of = e % kPart, i = e / kPart % QuadsM;
      const int j = t / kTotals * kFolded + e / kPart / QuadsM;
      const int64_t n = tile.group * kN + j / 4 * LanesN * 4 + of % LanesN * 4 + j % 4;
      if (e >= sums || n >= outputs) continue;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        const int64_t row = tile.rows * kM + i * LanesM * 4 + of / LanesN * 4 + (q ^ 1);
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

typedef Sliced<4, 4, 8, 16, 4, 4> SlicedWide;   // 32 x 64
typedef Sliced<4, 4, 8, 12, 3, 16> SlicedEven;  // 32 x 48
typedef Sliced<2, 8, 8, 8, 2, 16> SlicedDeep;   // 16 x 64
typedef Sliced<4, 8, 8, 8, 1, 16> SlicedShort;  // 32 x 64, of 8 chunks at once instead of 16
enum {
  kSlicedWide = SlicedWide::quads,
  kSlicedEven = SlicedEven::quads,
  kSlicedDeep = SlicedDeep::quads,
  kSlicedShort = SlicedShort::quads,
};

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
#define VOX_STEP_SLICED_OF(suffix, F) \
  VOX_STEP_SLICED(suffix, F, Wide)    \
  VOX_STEP_SLICED(suffix, F, Even)    \
  VOX_STEP_SLICED(suffix, F, Deep)    \
  VOX_STEP_SLICED(suffix, F, Short)
VOX_STEP_SLICED_OF(f16, PackedF16)
VOX_STEP_SLICED_OF(bf16, PackedBf16)
#undef VOX_STEP_SLICED_OF
#undef VOX_STEP_SLICED
