// Several rows times 16-bit weights: float32 chains in registers, each C128's own, a weight read once for all of a
// group's rows.
//
// The four warps of a group are `Slices` slices of the columns: a slice has every `Slices`th chunk, and its warps
// lie beside one another over the rows. A warp makes LanesM * RM rows by 32 / LanesM * RN outputs, RM x RN chains a
// lane. Rows come through shared memory, sixteen columns a stage and one stage ahead; weights go from memory to the
// lanes that widen them. When each slice has done a chunk, the chunks are folded in their order through shared memory.

namespace vox {
namespace VOX_ISA {

struct RowTileIn {
  const float* x;
  const Piece *w0, *w1, *w2;
  const float* residual;
  float *out0, *out1, *out2;
  int32_t *faults0, *faults1, *faults2;
};

// A pointer that the compiler keeps, and does not make again wherever it is used.
CANON const float* kept(const float* pointer) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+l"(pointer));
#endif
  return pointer;
}

template <class F, int LanesM, int RM, int RN, int Slices, int Ahead>
struct RowTiles {
  enum {
    LanesN = 32 / LanesM,
    Warps = kGroup / 32 / Slices,  // of a slice
    kWarpM = LanesM * RM,
    kM = Warps * kWarpM,
    kN = LanesN * RN,
    kStep = 8,    // columns of a piece
    kStages = 8,  // of a chunk
    kColumns = 16,
    pitch = kColumns + 4,  // four rows read different banks
    stage = kM * pitch,
    kRing = Ahead + 1,  // stages
    rows_floats = kRing * Slices * stage,
    slab = Warps * RM * 32,  // of a slice, for one of a lane's outputs
    all = (rows_floats + 2 * Slices * slab) / 4,
    kTotals = (slab + kGroup - 1) / kGroup,  // of a thread, for each of a lane's outputs
    kSent = kM * 4 / (32 * Warps),           // quads of a stage that a thread sends
    kLines = kN / 8 * 16 / 32,               // of a chunk of weights, for each lane
  };

  struct Place {
    const Piece* weight;    // of the lane's first output
    int64_t next_output;    // pieces from one of the lane's outputs to the next
    const float* x[kSent];  // of the first stage
    int32_t chunks, columns;
  };

  struct Stage {
    int32_t chunk, s;
  };

  CANON void load(const Place& at, Piece* to, int32_t piece) {
#pragma unroll
    for (int j = 0; j < RN; ++j) to[j] = streamed(at.weight + j * at.next_output + (int64_t)piece * 8);
  }
  // The chunk's weights, on their way into the second cache: each lane asks for its share of the lines.
  CANON void expect(const Place& at, const Piece* first, int32_t chunk) {
    if (at.columns - chunk * (int32_t)kChunk < (int32_t)kChunk) return;
    const int lane = VOX_LOCAL % 32;
#pragma unroll
    for (int s = 0; s < kLines; ++s) {
      const int line = lane + 32 * s;
      expected(first + ((int64_t)(line / 16) * (at.columns / 8) + chunk * 16 + line % 16) * 8);
    }
  }
  // Sixteen columns of the rows, from stage `s` of a chunk on.
  CANON void send(const Place& at, float* to, int32_t chunk, int32_t s) {
    const int thread = VOX_LOCAL % (32 * Warps);
    const int32_t first = chunk * (int32_t)kChunk + s * kColumns;
    if (first + thread % 4 * 4 >= at.columns) return;
    to += thread / 4 * pitch + thread % 4 * 4;
#pragma unroll
    for (int u = 0; u < kSent; ++u) sent<16>(to + u * 8 * Warps * pitch, at.x[u] + first);
  }
  // Eight more terms of every chain.
  CANON void eight(float (&p)[RM][RN], const Piece* w, const float* rows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      Quad x[RM];
#pragma unroll
      for (int i = 0; i < RM; ++i) x[i] = *(const Quad*)(rows + i * LanesM * pitch + 4 * half);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float v[RN];
#pragma unroll
        for (int j = 0; j < RN; ++j) {
          const uint32_t word = w[j].words[2 * half + k / 2];
          v[j] = k % 2 == 0 ? F::low(word) : F::high(word);
        }
#pragma unroll
        for (int j = 0; j < RN; ++j)
#pragma unroll
          for (int i = 0; i < RM; ++i) p[i][j] = f_fma(x[i].values[k], v[j], p[i][j]);
      }
    }
  }

  CANON void run(const RowTileIn& in, const TileArgs& args, float* shared) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32, slice = warp / Warps;
    const TilePlace tile = tile_place<kM, kN>(args);
    const int64_t first_output = tile.group * kN, first_row = tile.rows * kM;
    const Piece* weight = tile.which == 0 ? in.w0 : tile.which == 1 ? in.w1 : in.w2;
    const Piece* of_group = weight + piece_at(first_output, 0, args.columns / 8);
    Place at = {weight + piece_at(first_output + lane % LanesN, 0, args.columns / 8),
                (int64_t)LanesN * (args.columns / 8), {}, (args.columns - 1) / (int32_t)kChunk + 1, args.columns};
#pragma unroll
    for (int u = 0; u < kSent; ++u) {
      const int quad = VOX_LOCAL % (32 * Warps) + u * 32 * Warps;
      const int64_t row = first_row + quad / 4;
      at.x[u] = kept(in.x + (row < args.rows ? row : args.rows - 1) * args.columns + quad % 4 * 4);
    }
    float* staged = shared + slice * kRing * stage;
    float* partials = shared + rows_floats;
    const float* mine = staged + (warp % Warps * kWarpM + lane / LanesN) * pitch;
    // Pieces of this stage and, where weights are asked for a stage ahead, of the next one: two steps each.
    Piece w[Ahead][2][RN];
    int32_t chunk = slice;
    const int32_t pieces = args.columns / 8;
    // The stage `by` stages on from stage `s` of the chunk, of this slice.
    auto on = [&](int32_t s, int by) {
      return s + by < kStages ? Stage{chunk, s + by} : Stage{chunk + Slices, s + by - kStages};
    };
    auto is_there = [&](Stage to) { return to.chunk * 16 + 2 * to.s < pieces && to.chunk < at.chunks; };
    auto load_step = [&](Piece* to, Stage from, int step) {
      const int32_t piece = from.chunk * 16 + 2 * from.s + step;
      if (from.chunk < at.chunks && piece < pieces) load(at, to, piece);
    };
    if (chunk < at.chunks) {
      load_step(w[0][0], on(0, 0), 0);
      if (Ahead == 2) load_step(w[0][1], on(0, 0), 1);
      expect(at, of_group, chunk);
      if (chunk + Slices < at.chunks) expect(at, of_group, chunk + Slices);
    }
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < Ahead; ++s) {
      if (is_there(on(0, s))) send(at, staged + s * stage, on(0, s).chunk, on(0, s).s);
      end_of_stage();
    }
    float total[RN][kTotals];
    int32_t at_stage = 0;  // of the ring
    for (int32_t first = 0; first < at.chunks; first += Slices, chunk += Slices) {
      float p[RM][RN];
#pragma unroll
      for (int i = 0; i < RM; ++i)
#pragma unroll
        for (int j = 0; j < RN; ++j) p[i][j] = 0.0f;
      if (chunk + 2 * Slices < at.chunks) expect(at, of_group, chunk + 2 * Slices);
#pragma unroll 1
      for (int32_t s0 = 0; s0 < kStages; s0 += Ahead) {
#pragma unroll
        for (int u = 0; u < Ahead; ++u) {
          const int32_t s = s0 + u;
          arrived_but<Ahead - 1>();
          if (Warps == 1)
            warp_barrier();
          else
            VOX_BARRIER();  // this stage is there, and the one before it is read
          const Stage sent_next = on(s, Ahead), next = on(s, 1);
          int32_t free = at_stage + Ahead;
          free = free >= kRing ? free - kRing : free;
          if (is_there(sent_next)) send(at, staged + free * stage, sent_next.chunk, sent_next.s);
          end_of_stage();
          const float* rows = mine + at_stage * stage;
          at_stage = at_stage + 1 == kRing ? 0 : at_stage + 1;
          const int32_t left = pieces - (chunk * 16 + 2 * s);
          if (left <= 0) continue;
          if (Ahead == 2) {
            load_step(w[1 - u][0], next, 0);
            eight(p, w[u][0], rows);
            load_step(w[1 - u][1], next, 1);
            if (left > 1) eight(p, w[u][1], rows + kStep);
          } else {
            load_step(w[0][1], on(s, 0), 1);
            eight(p, w[0][0], rows);
            load_step(w[0][0], next, 0);
            if (left > 1) eight(p, w[0][1], rows + kStep);
          }
        }
      }
      const int32_t count = at.chunks - first < Slices ? at.chunks - first : Slices;
#pragma unroll
      for (int j = 0; j < RN; ++j) {
        float* of_output = partials + j % 2 * Slices * slab;
#pragma unroll
        for (int i = 0; i < RM; ++i) of_output[(warp * RM + i) * 32 + lane] = p[i][j];
        VOX_BARRIER();
#pragma unroll
        for (int u = 0; u < kTotals; ++u) {
          const int e = VOX_LOCAL + u * kGroup;
          if (e >= slab) continue;
#pragma unroll
          for (int c = 0; c < Slices; ++c)
            if (c < count) total[j][u] = chunk_folded(first == 0 && c == 0, total[j][u], of_output[c * slab + e]);
        }
      }
    }
    const int32_t outputs = tile.which == 0 ? args.outputs0 : tile.which == 1 ? args.outputs1 : args.outputs2;
    float* out = tile.which == 0 ? in.out0 : tile.which == 1 ? in.out1 : in.out2;
    int32_t* faults = tile.which == 0 ? in.faults0 : tile.which == 1 ? in.faults1 : in.faults2;
#pragma unroll
    for (int j = 0; j < RN; ++j)
#pragma unroll
      for (int u = 0; u < kTotals; ++u) {
        const int e = VOX_LOCAL + u * kGroup, i = e / 32 % RM, of = e % 32;
        const int64_t row = first_row + e / (32 * RM) * kWarpM + i * LanesM + of / LanesN;
        const int64_t n = first_output + j * LanesN + of % LanesN;
        if (e >= slab || row >= args.rows || n >= outputs) continue;
        float y = total[j][u];
        VOX_WATCH(y, row);
        if (args.mode == kAddResidual) {
          y = f_add(in.residual[row * outputs + n], y);
          if (!is_finite(y)) in.faults1[row] = 1;
        }
        out[row * outputs + n] = y;
      }
  }
};


// Many rows: a product as in training (chains.h), of one of three weights, added to the residual if there is one.
struct ProductEnds {
  const float* residual;
  float* out;
  int32_t *faults, *faults_of_sum;
  int64_t row, column;    // the group's first
  int32_t rows, outputs;  // of the result; outputs are a multiple of four
  int32_t mode;

  CANON void take(const ProductEnds& it, int row, int column, const Quad& sum) {
    const int64_t r = it.row + row, n = it.column + column;
    if (r >= it.rows || n >= it.outputs) return;
    Quad y = sum;
    int32_t* faults = it.faults;
#pragma unroll
    for (int q = 0; q < 4; ++q) VOX_WATCH(y.values[q], r);
    if (it.mode == kAddResidual) {
      const Quad side = *(const Quad*)(it.residual + r * it.outputs + n);
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        y.values[q] = f_add(side.values[q], y.values[q]);
        if (!is_finite(y.values[q])) it.faults_of_sum[r] = 1;
      }
    }
    *(Quad*)(it.out + r * it.outputs + n) = y;
  }
};

template <class F, class Shape>
CANON void row_product(const RowTileIn& in, const TileArgs& args, float* shared) {
  const TilePlace tile = tile_place<Shape::kM, Shape::kN>(args);
  const Piece* weight = tile.which == 0 ? in.w0 : tile.which == 1 ? in.w1 : in.w2;
  const int32_t outputs = tile.which == 0 ? args.outputs0 : tile.which == 1 ? args.outputs1 : args.outputs2;
  const int64_t row = tile.rows * Shape::kM, column = tile.group * Shape::kN, left = args.rows - row;
  FloatsAcross<Shape::kM, Shape::kTerms> rows;
  rows.find(rows, in.x + row * args.columns, args.columns, left < Shape::kM ? (int32_t)left : (int32_t)Shape::kM);
  typename HalvesForth<F>::template Stage<Shape::kN, Shape::kTerms> columns;
  columns.find(columns, weight, nullptr, column, {args.columns, outputs});
  wait_for_inputs();
  const ProductEnds ends = {in.residual,
                        tile.which == 0 ? in.out0 : tile.which == 1 ? in.out1 : in.out2,
                        tile.which == 0 ? in.faults0 : tile.which == 1 ? in.faults1 : in.faults2,
                        in.faults1, row, column, args.rows, outputs, args.mode};
  Shape::run(rows, columns, args.columns, ends, shared);
}

// Name, lanes across the rows, rows and outputs of a lane, slices, stages that rows are ahead.
#define VOX_ROW_TILES(name, LanesM, RM, RN, Slices, Ahead)               \
  template <class F>                                                    \
  using RowTiles##name = RowTiles<F, LanesM, RM, RN, Slices, Ahead>;     \
  enum { kRowTiles##name = RowTiles##name<PackedBf16>::all };
VOX_ROW_TILES(8, 2, 4, 2, 4, 2)      // 8 x 32
#undef VOX_ROW_TILES

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_ROWS(suffix, name, at_once, memory, call)                                                          \
  VOX_KERNEL_AT_ONCE(at_once, vox_step_tiles_##suffix##_##name)(                                                    \
      VOX_IN(float, x, 0), VOX_IN(Piece, w0, 1), VOX_IN(Piece, w1, 2), VOX_IN(Piece, w2, 3),                        \
      VOX_IN(float, residual, 4), VOX_OUT(float, out0, 5), VOX_OUT(float, out1, 6), VOX_OUT(float, out2, 7),        \
      VOX_OUT(int32_t, faults0, 8), VOX_OUT(int32_t, faults1, 9), VOX_OUT(int32_t, faults2, 10),                    \
      VOX_ARGS(TileArgs, 11)) {                                                                                     \
    memory;                                                                                                         \
    const RowTileIn in = {x, w0, w1, w2, residual, out0, out1, out2, faults0, faults1, faults2};                    \
    call(in, args, (float*)(Quad*)shared);                                                                          \
  }
#define VOX_STEP_FEW_ROWS(suffix, F, name, at_once)                                                                 \
  VOX_STEP_ROWS(suffix, name, at_once, VOX_SHARED Quad shared[kRowTiles##name], RowTiles##name<F>::run)
#define VOX_STEP_MANY_ROWS(suffix, F, name, at_once)                                                                \
  VOX_ASKS(vox_step_tiles_##suffix##_##name, kProduct##name)                                                        \
  VOX_STEP_ROWS(suffix, name, at_once, VOX_ASKED(kProduct##name, shared),                                           \
                (row_product<F, Product##name>))
#define VOX_STEP_ROWS_OF(suffix, F)        \
  VOX_STEP_FEW_ROWS(suffix, F, 8, 4)       \
  VOX_STEP_MANY_ROWS(suffix, F, Low, 4)    \
  VOX_STEP_MANY_ROWS(suffix, F, High, 2)   \
  VOX_STEP_MANY_ROWS(suffix, F, Most, 2)
VOX_STEP_ROWS_OF(f16, PackedF16)
VOX_STEP_ROWS_OF(bf16, PackedBf16)
#undef VOX_STEP_ROWS_OF
#undef VOX_STEP_MANY_ROWS
#undef VOX_STEP_FEW_ROWS
#undef VOX_STEP_ROWS
