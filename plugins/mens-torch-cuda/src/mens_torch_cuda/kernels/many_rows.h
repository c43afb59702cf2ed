// Many rows times Q8_0 weights on tensor cores: the products and sums of tiles.h and few_rows.h, for columns that are
// whole chunks, of codes in the order of tiles (between.h).
//
// A group makes kM x kN outputs: its warps lie AcrossM x AcrossN, each has TilesM x TilesN tiles of 16 rows and 8
// outputs. A chunk of both sides is a stage of shared memory, some stages ahead, and as it lies in memory: what comes
// from one place there is one copy, by one thread, where the GPU has such copies. A lane finds its four words of
// sixteen rows side by side, and all that differs from chunk to chunk is where the stage begins.

namespace vox {
namespace VOX_ISA {

// Stages of shared memory that are filled by copies of whole stretches: one thread asks for a stretch, and a barrier
// in shared memory counts the bytes that came. Where there are no such copies, the lanes of a warp share a stretch.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define VOX_HAS_BULK 1
#else
#define VOX_HAS_BULK 0
#endif

#if VOX_HAS_BULK
CANON uint32_t shared_at(const void* at) { return (uint32_t)__cvta_generic_to_shared(at); }
CANON void bulk_init(uint8_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(shared_at(barrier))
               : "memory");
}
CANON void bulk_expect(uint8_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_at(barrier)), "r"(bytes) : "memory");
}
CANON void bulk_copy(uint8_t* to, const uint8_t* from, uint32_t bytes, uint8_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_at(to)),
               "l"(from), "r"(bytes), "r"(shared_at(barrier))
               : "memory");
}
CANON void bulk_wait(uint8_t* barrier, uint32_t parity) {
  uint32_t is_done;
  do {
    asm volatile(
        "{\n\t.reg .pred there;\n\tmbarrier.try_wait.parity.shared::cta.b64 there, [%1], %2;\n\tselp.u32 %0, 1, 0, there;\n\t}"
        : "=r"(is_done)
        : "r"(shared_at(barrier)), "r"(parity)
        : "memory");
  } while (is_done == 0);
}
#endif

// Two floats side by side: at once where every pair is aligned; or the first one alone.
CANON TwoFloats two_at(const float* from, bool is_aligned, bool is_pair) {
  if (is_aligned) return *(const TwoFloats*)from;
  return {{from[0], is_pair ? from[1] : 0.0f}};
}
CANON void put_two(float* to, const TwoFloats& y, bool is_aligned, bool is_pair) {
  if (is_aligned) {
    *(TwoFloats*)to = y;
    return;
  }
  to[0] = y.values[0];
  if (is_pair) to[1] = y.values[1];
}

struct alignas(8) FourHalves {
  uint16_t values[4];
};

template <int AcrossM, int AcrossN, int TilesM, int TilesN, int Stages>
struct ManyRows {
  enum {
    kThreads = 32 * AcrossM * AcrossN,
    kBlocks = 4,  // of a chunk
    kM = AcrossM * TilesM * 16,
    kN = AcrossN * TilesN * 8,
    kRowCodes = 16 * (int)kChunk,  // bytes of sixteen rows and a chunk, and of their scales
    kRowScales = 16 * kBlocks * 4,
    kWeightCodes = 8 * (int)kChunk,  // and of eight outputs
    kWeightScales = 8 * kBlocks * 2,
    kHigh = kM / 16,
    kWide = kN / 8,
    weights = kHigh * kRowCodes,
    row_scales = weights + kWide * kWeightCodes,
    weight_scales = row_scales + kHigh * kRowScales,
    stage = weight_scales + kWide * kWeightScales,
    kCopies = 2 * kHigh + 2 * kWide,  // of a stage
    quads = stage * Stages / 16 + Stages,
  };
  static_assert(kCopies <= kThreads, "a thread makes a copy at most");

  // A stretch of memory that is a part of every stage.
  struct Copy {
    const uint8_t* from;
    uint32_t apart;  // from one chunk to the next
    int32_t to, bytes;
  };
  struct Place {
    const uint8_t *rows, *row_scales, *weights, *weight_scales;
    int64_t row, n;  // the first of the group
    int32_t last_high, last_wide, chunks;  // what is beyond the last rows and outputs is that of the last ones
  };
  CANON bool is_of_rows(int index) { return index < 2 * kHigh; }
  CANON Copy copy_of(const Place& at, int index) {
    const bool is_row = is_of_rows(index);
    const int inside = is_row ? index : index - 2 * kHigh, count = is_row ? (int)kHigh : (int)kWide;
    const bool is_scale = inside >= count;
    const int32_t part = is_scale ? inside - count : inside, last = is_row ? at.last_high : at.last_wide;
    const int64_t tile = (is_row ? at.row / 16 : at.n / 8) + (part < last ? part : last);
    if (is_row && is_scale)
      return {at.row_scales + tile * at.chunks * kRowScales, kRowScales, row_scales + part * kRowScales, kRowScales};
    if (is_row) return {at.rows + tile * at.chunks * kRowCodes, kRowCodes, part * kRowCodes, kRowCodes};
    if (is_scale)
      return {at.weight_scales + tile * at.chunks * kScalesApart, kScalesApart, weight_scales + part * kWeightScales,
              kWeightScales};
    return {at.weights + tile * at.chunks * kCodesApart, kCodesApart, weights + part * kWeightCodes, kWeightCodes};
  }

#if VOX_HAS_BULK
  struct Bringing {
    Copy mine;
    uint8_t *shared, *barriers;
  };
  CANON Bringing bringing(const Place& at, uint8_t* shared) {
    Bringing to = {{}, shared, shared + stage * Stages};
    if (VOX_LOCAL < kCopies) to.mine = copy_of(at, VOX_LOCAL);
    if (VOX_LOCAL == 0)
#pragma unroll
      for (int s = 0; s < Stages; ++s) bulk_init(to.barriers + 8 * s);
    VOX_BARRIER();
    return to;
  }
  CANON void expect(const Bringing& by, int32_t slot) {
    if (VOX_LOCAL == 0) bulk_expect(by.barriers + 8 * slot, stage);
  }
  CANON void bring(const Bringing& by, const Place&, int32_t slot, int32_t chunk, bool of_rows, bool of_weights) {
    if (VOX_LOCAL < kCopies && (is_of_rows(VOX_LOCAL) ? of_rows : of_weights))
      bulk_copy(by.shared + slot * stage + by.mine.to, by.mine.from + (uint64_t)(uint32_t)chunk * by.mine.apart,
                (uint32_t)by.mine.bytes, by.barriers + 8 * slot);
  }
  CANON void arrived(const Bringing& by, int32_t slot, uint32_t parity) { bulk_wait(by.barriers + 8 * slot, parity); }
  template <int Left>
  CANON void sent_but() {}
  CANON void no_more() {}
#else
  struct Bringing {
    uint8_t* shared;
  };
  CANON Bringing bringing(const Place&, uint8_t* shared) { return {shared}; }
  CANON void expect(const Bringing&, int32_t) {}
  CANON void bring(const Bringing& by, const Place& at, int32_t slot, int32_t chunk, bool of_rows, bool of_weights) {
    const int warp = VOX_LOCAL / 32, lane = VOX_LOCAL % 32;
    for (int index = warp; index < kCopies; index += kThreads / 32) {
      if (is_of_rows(index) ? !of_rows : !of_weights) continue;
      const Copy one = copy_of(at, index);
      for (int i = lane * 16; i < one.bytes; i += 32 * 16)
        sent<16>(by.shared + slot * stage + one.to + i, one.from + (int64_t)chunk * one.apart + i);
    }
    if (of_rows) end_of_stage();
  }
  CANON void no_more() { end_of_stage(); }
  CANON void arrived(const Bringing&, int32_t, uint32_t) {}
  template <int Left>
  CANON void sent_but() {
    arrived_but<Left>();
  }
#endif

  // A chunk of every sum.
  CANON void chunk(const uint8_t* here, int high, int wide, float (&total)[TilesM][TilesN][4]) {
    const int lane = VOX_LOCAL % 32;
    const uint8_t *rows = here + high * kRowCodes, *outputs = here + weights + wide * kWeightCodes;
    const uint8_t *of_rows = here + row_scales + high * kRowScales, *of_outputs = here + weight_scales + wide * kWeightScales;
    Quad x_scale[TilesM][2];
    FourHalves w_scale[TilesN][2];
#pragma unroll
    for (int q = 0; q < 2; ++q) {
#pragma unroll
      for (int i = 0; i < TilesM; ++i) x_scale[i][q] = *(const Quad*)(of_rows + i * kRowScales + q * 128 + lane / 4 * 16);
#pragma unroll
      for (int j = 0; j < TilesN; ++j) w_scale[j][q] = *(const FourHalves*)(of_outputs + j * kWeightScales + lane % 4 * 16 + q * 8);
    }
    float p[TilesM][TilesN][4];
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      TwoWords w[TilesN];
      float d[TilesN][2];
#pragma unroll
      for (int j = 0; j < TilesN; ++j) {
        w[j] = tile_outputs(outputs + j * kWeightCodes + b * 256);
#pragma unroll
        for (int q = 0; q < 2; ++q) d[j][q] = f16_widened(w_scale[j][q].values[b]);
      }
#pragma unroll
      for (int i = 0; i < TilesM; ++i) {
        const uint8_t* tile = rows + i * kRowCodes + b * 512;
        const Bytes16 x = *(const Bytes16*)(tile + lane * 16);
#pragma unroll
        for (int j = 0; j < TilesN; ++j) {
          const FourDots dots = straight_dots(x, w[j], tile, outputs + j * kWeightCodes + b * 256);
#pragma unroll
          for (int q = 0; q < 4; ++q)
            p[i][j][q] = f_fma(f_mul(d[j][q % 2], x_scale[i][q / 2].values[b]), dots.values[q], b == 0 ? 0.0f : p[i][j][q]);
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
    const int high = warp % AcrossM * TilesM, wide = warp / AcrossM * TilesN;
    const TilePlace tile = tile_place<kM, kN>(args);
    const int which = tile.which;
    const int32_t outputs = which == 0 ? args.outputs0 : which == 1 ? args.outputs1 : args.outputs2;
    const Place at = {(const uint8_t*)in.codes,
                      (const uint8_t*)in.scales,
                      (const uint8_t*)(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2),
                      (const uint8_t*)(which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2),
                      tile.rows * kM,
                      tile.group * kN,
                      (int32_t)((args.rows - 1) / 16 - tile.rows * kHigh),
                      (int32_t)((outputs - 1) / 8 - tile.group * kWide),
                      args.columns / (int32_t)kChunk};
    const Bringing by = bringing(at, shared);
#pragma unroll
    for (int s = 0; s < Stages; ++s)
      if (s < at.chunks) {
        expect(by, s);
        bring(by, at, s, s, false, true);
      }
    wait_for_inputs();
#pragma unroll
    for (int s = 0; s < Stages; ++s)
      if (s < at.chunks) bring(by, at, s, s, true, false);
      else no_more();
    sent_but<Stages - 1>();
    VOX_BARRIER();
    // A sum starts at -0: added to a first chunk it leaves what that is, +0 and -0 too.
    float total[TilesM][TilesN][4];
#pragma unroll
    for (int i = 0; i < TilesM; ++i)
#pragma unroll
      for (int j = 0; j < TilesN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q) total[i][j][q] = -0.0f;
    int32_t slot = 0;
    uint32_t parity = 0;
#pragma unroll 1
    for (int32_t c = 0; c < at.chunks; ++c) {
      arrived(by, slot, parity);
      chunk(shared + slot * stage, high, wide, total);
      sent_but<Stages - 2>();
      VOX_BARRIER();  // this stage is read, and where stages are sent by all, the next one is there
      if (c + Stages < at.chunks) {
        expect(by, slot);
        bring(by, at, slot, c + Stages, true, true);
      } else {
        no_more();
      }
      if (++slot == Stages) {
        slot = 0;
        parity ^= 1;
      }
    }
    float* out = which == 0 ? in.out0 : which == 1 ? in.out1 : in.out2;
    int32_t* faults = which == 0 ? in.faults0 : which == 1 ? in.faults1 : in.faults2;
    const float* residual = args.mode == kAddResidual ? in.residual : nullptr;
    const bool is_even = outputs % 2 == 0;
    const int64_t n = at.n + wide * 8 + lane % 4 * 2;  // of the lane's first sum, as its row
#pragma unroll
    for (int i = 0; i < 2 * TilesM; ++i) {
      const int64_t row = at.row + high * 16 + lane / 4 + i * 8, first = row * outputs + n;
      if (row >= args.rows) continue;
      float seen = 0.0f, seen_sums = 0.0f;  // NaN after an infinity or a NaN
#pragma unroll
      for (int j = 0; j < TilesN; ++j) {
        if (n + j * 8 >= outputs) continue;
        const bool is_pair = is_even || n + j * 8 + 1 < outputs;
        TwoFloats y = {{total[i / 2][j][i % 2 * 2], is_pair ? total[i / 2][j][i % 2 * 2 + 1] : 0.0f}};
#pragma unroll
        for (int q = 0; q < 2; ++q) seen = f_fma(y.values[q], 0.0f, seen);
        if (residual != nullptr) {
          const TwoFloats x = two_at(residual + first + j * 8, is_even, is_pair);
#pragma unroll
          for (int q = 0; q < 2; ++q) {
            y.values[q] = f_add(x.values[q], y.values[q]);
            seen_sums = f_fma(y.values[q], 0.0f, seen_sums);
          }
        }
        put_two(out + first + j * 8, y, is_even, is_pair);
      }
      if (!is_finite(seen)) faults[row] = 1;
      if (!is_finite(seen_sums)) in.faults1[row] = 1;
    }
  }
};

// Name, warps and their tiles of rows and of outputs, stages.
#define VOX_MANY_ROWS(name, ...)             \
  typedef ManyRows<__VA_ARGS__> ManyRows##name; \
  enum { kMany##name = ManyRows##name::quads, kManyThreads##name = ManyRows##name::kThreads };
VOX_MANY_ROWS(32x32by2, 1, 2, 2, 2, 5)
VOX_MANY_ROWS(32x64by4, 1, 4, 2, 2, 4)
VOX_MANY_ROWS(64x64by4, 1, 4, 4, 2, 4)
VOX_MANY_ROWS(64x64by2, 1, 2, 4, 4, 3)
#undef VOX_MANY_ROWS

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_MANY_ROWS(name, at_once)                                                                            \
  VOX_ASKS(vox_step_tiles_q8_0_##name, kMany##name)                                                    \
  VOX_KERNEL_OF(kManyThreads##name, at_once, vox_step_tiles_q8_0_##name)(                              \
      VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(Piece, w0, 2), VOX_IN(Piece, w1, 3),               \
      VOX_IN(Piece, w2, 4), VOX_IN(uint16_t, d0, 5), VOX_IN(uint16_t, d1, 6), VOX_IN(uint16_t, d2, 7),              \
      VOX_IN(float, residual, 8), VOX_OUT(float, out0, 9), VOX_OUT(float, out1, 10), VOX_OUT(float, out2, 11),      \
      VOX_OUT(int32_t, faults0, 12), VOX_OUT(int32_t, faults1, 13), VOX_OUT(int32_t, faults2, 14),                  \
      VOX_ARGS(TileArgs, 15)) {                                                                                     \
    VOX_ASKED(kMany##name, shared);                                                                                 \
    const TileIn in = {codes, scales, w0, w1, w2, d0, d1, d2, residual, out0, out1, out2, faults0, faults1, faults2}; \
    ManyRows##name::run(in, args, (uint8_t*)(Quad*)shared);                                                         \
  }
VOX_STEP_MANY_ROWS(32x32by2, 5)
VOX_STEP_MANY_ROWS(32x64by4, 4)
VOX_STEP_MANY_ROWS(64x64by4, 3)
VOX_STEP_MANY_ROWS(64x64by2, 4)
#undef VOX_STEP_MANY_ROWS
