// Products of many rows in float32, for training: C128 of rows with a weight's columns, or with its rows. Compiled
// behind the grid kernels and packed.h, in the same text.
//
// A group makes kM x kN outputs, a thread kQuadsM x kQuadsN squares of 4 x 4. Terms come through shared memory,
// kK at a time and one stage ahead; each output is one chain over its chunk of 128 terms, and its chunks are folded
// in their order. What is beyond the last term takes no part.

namespace vox {
namespace VOX_ISA {

struct BroadArgs {  // group (columns, rows); in the order of the result
  int32_t rows;
  int32_t terms;
  int32_t columns;
};

enum { kBroadGap = 4 };  // floats between rows of a stage: threads that write, and quads, use different banks

// A stage of a side in float32 whose terms lie one behind the other, [outputs][terms] in memory: as [kK][kOut].
template <int kOut, int kK>
struct FloatsAcross {
  enum { pitch = kOut + kBroadGap, of_output = kK / 4, quads = kOut * of_output, each = (quads + kGroup - 1) / kGroup };
  const float* from[each];
  Quad held[each];

  // `x`: the first of `count` outputs, `stride` floats apart. What is beyond them is not stored.
  CANON void find(FloatsAcross& it, const float* x, int64_t stride, int32_t count) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup, output = at / of_output;
      it.from[i] = x + (output < count ? output : count - 1) * stride + at % of_output * 4;
    }
  }
  // Terms from k on, up to `end`; a quad of which one is there is there.
  CANON void load(FloatsAcross& it, int32_t k, int32_t end) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup;
      if (at < quads && k + at % of_output * 4 < end) it.held[i] = *(const Quad*)(it.from[i] + k);
    }
  }
  CANON void store(const FloatsAcross& it, float* to) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup;
      if (at >= quads) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) to[(at % of_output * 4 + j) * pitch + at / of_output] = it.held[i].values[j];
    }
  }
};

// The same of a side that is [terms][outputs] in memory.
template <int kOut, int kK>
struct FloatsAlong {
  enum { pitch = kOut + kBroadGap, of_term = kOut / 4, quads = kK * of_term, each = (quads + kGroup - 1) / kGroup };
  const float* from[each];
  int64_t stride;
  Quad held[each];

  // `x`: the first of `count` outputs, a multiple of four, of term 0.
  CANON void find(FloatsAlong& it, const float* x, int64_t stride, int32_t count) {
    it.stride = stride;
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup, output = at % of_term * 4;
      it.from[i] = x + at / of_term * stride + (output < count ? output : count - 4);
    }
  }
  CANON void load(FloatsAlong& it, int32_t k, int32_t end) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup;
      if (at < quads && k + at / of_term < end) it.held[i] = *(const Quad*)(it.from[i] + k * it.stride);
    }
  }
  CANON void store(const FloatsAlong& it, float* to) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup;
      if (at < quads) *(Quad*)(to + at / of_term * pitch + at % of_term * 4) = it.held[i];
    }
  }
};

// A stage of packed 16-bit weights whose outputs are the terms: [kK outputs][kN columns].
template <class F>
struct HalvesBack {
  template <int kN, int kK>
  struct Stage {
    enum { pitch = kN + kBroadGap, pieces = kN / 8 * kK, each = (pieces + kGroup - 1) / kGroup };
    const Piece* from[each];
    int64_t stride;
    Piece held[each];

    CANON void find(Stage& it, const Piece* weight, const uint16_t*, int64_t column, const BroadArgs& args) {
      it.stride = args.columns / 8;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        const int64_t piece = column / 8 + at / 8 % (kN / 8), last = args.columns / 8 - 1;
        it.from[i] = weight + piece_at(at / kN * 8 + at % 8, piece < last ? piece : last, args.columns / 8);
      }
    }
    CANON void load(Stage& it, int32_t k, int32_t end) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (at < pieces && k + at / kN * 8 < end) it.held[i] = it.from[i][k * it.stride];
      }
    }
    CANON void store(const Stage& it, float* to) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (at >= pieces) continue;
        float* place = to + (at / kN * 8 + at % 8) * pitch + at / 8 % (kN / 8) * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t a = it.held[i].words[2 * half], b = it.held[i].words[2 * half + 1];
          *(Quad*)(place + 4 * half) = {{F::low(a), F::high(a), F::low(b), F::high(b)}};
        }
      }
    }
  };
};

// A stage of packed 16-bit weights whose columns are the terms: [kK columns][kN outputs].
template <class F>
struct HalvesForth {
  template <int kN, int kK>
  struct Stage {
    enum { pitch = kN + kBroadGap, pieces = kN / 8 * kK, each = (pieces + kGroup - 1) / kGroup };
    const Piece* from[each];
    Piece held[each];

    CANON void find(Stage& it, const Piece* weight, const uint16_t*, int64_t column, const BroadArgs& args) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        // Outputs are padded to a multiple of kN's: what is there is zero, and not stored.
        it.from[i] = weight + piece_at(column + at / kK * 8 + at % 8, at / 8 % (kK / 8), args.terms / 8);
      }
    }
    CANON void load(Stage& it, int32_t k, int32_t end) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (at < pieces && k + at / 8 % (kK / 8) * 8 < end) it.held[i] = it.from[i][k];
      }
    }
    CANON void store(const Stage& it, float* to) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (at >= pieces) continue;
        float* place = to + at / 8 % (kK / 8) * 8 * pitch + at / kK * 8 + at % 8;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          place[2 * j * pitch] = F::low(it.held[i].words[j]);
          place[(2 * j + 1) * pitch] = F::high(it.held[i].words[j]);
        }
      }
    }
  };
};

// The low byte of a word as a signed integer, in float32: exact.
CANON float code_as_float(uint32_t word) {
  const uint32_t bits = 0x4B000000u | ((word ^ 0x80u) & 0xFFu);  // 2^23 + 128 + the code
  return f_sub(f_from((int32_t)bits), f_from(0x4B000080));
}

// Packed Q8_0 weights whose outputs are the terms, each weight the product of its code and its block's scale.
struct CodesBack {
  template <int kN, int kK>
  struct Stage {
    enum { pitch = kN + kBroadGap, halves = kN / 8 * kK, each = (halves + kGroup - 1) / kGroup };
    struct alignas(8) Half {
      uint32_t words[2];
    };
    const Half* from[each];
    const uint16_t* scale[each];
    int64_t stride, of_scales;
    Half held[each];
    uint16_t d[each];

    // Eight codes of an output: [outputs / 8][pieces][output][half].
    CANON void find(Stage& it, const Piece* weight, const uint16_t* scales, int64_t column, const BroadArgs& args) {
      const int64_t pieces = args.columns / 16, blocks = args.columns / 32;
      it.stride = args.columns / 8;
      it.of_scales = (blocks + 3) / 4 * 4;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        const int64_t n = at / kN * 8 + at / 2 % 8, piece = column / 16 + at / 16 % (kN / 16);
        const int64_t there = piece < pieces ? piece : pieces - 1;
        it.from[i] = (const Half*)(weight + piece_at(n, there, pieces)) + at % 2;
        it.scale[i] = scales + scale_at(n, there / 2, blocks);
      }
    }
    CANON void load(Stage& it, int32_t k, int32_t end) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (at >= halves || k + at / kN * 8 >= end) continue;
        it.held[i] = it.from[i][k * it.stride];
        it.d[i] = it.scale[i][k * it.of_scales];
      }
    }
    CANON void store(const Stage& it, float* to) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (at >= halves) continue;
        const float d = f16_widened(it.d[i]);
        float* place = to + (at / kN * 8 + at / 2 % 8) * pitch + at / 16 % (kN / 16) * 16 + at % 2 * 8;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t word = it.held[i].words[half];
          *(Quad*)(place + 4 * half) = {{f_mul(code_as_float(word), d), f_mul(code_as_float(word >> 8), d),
                                         f_mul(code_as_float(word >> 16), d), f_mul(code_as_float(word >> 24), d)}};
        }
      }
    }
  };
};

// What becomes of a chunk's sum.
enum ChunkGoes { kNowhere, kFirst, kBehind, kBehindMemory };

// Chunks are added, and every term is seen.
struct AddedChunks {
  enum { masks = 0 };
  template <class Rule>
  CANON bool sees(const Rule&, int, int32_t) { return true; }
  template <class Rule>
  CANON bool is_whole(const Rule&, int32_t) { return true; }
  template <class Rule>
  CANON ChunkGoes chunk_goes(const Rule&, int, int32_t chunk) { return chunk == 0 ? kFirst : kBehind; }
  template <class Rule>
  CANON Quad folded(const Rule&, int, int32_t, const Quad& total, const Quad& chunk) {
    Quad y;
#pragma unroll
    for (int q = 0; q < 4; ++q) y.values[q] = chunk_folded(false, total.values[q], chunk.values[q]);
    return y;
  }
};

template <int QuadsM, int QuadsN, int kK, int Map, int Totals>
struct Broad {
  enum {
    kM = QuadsM * 64,  // two warps of eight quads
    kN = QuadsN * 32,  // two warps of four quads
    left = kK * (kM + kBroadGap),
    right = kK * (kN + kBroadGap),
    stage = left + right,
    all = 2 * stage / 4,  // quads
  };

  struct Sums {
    Quad v[QuadsM * 4][QuadsN];
  };
  // A warp's lanes lie eight by four. Lanes that differ in bit 0 read the same rows, in bit 1 the same columns: so
  // sixteen lanes read one side at once.
  CANON int row_of(int i) {
    const int lane = VOX_LOCAL % 32;
    const int place = Map == 0 ? lane % 8 : lane / 2 % 2 + lane / 8 * 2;
    return VOX_LOCAL / 32 % 2 * QuadsM * 32 + place * 4 + i / 4 * 32 + i % 4;
  }
  CANON int column_of(int j) {
    const int lane = VOX_LOCAL % 32;
    const int place = Map == 0 ? lane / 8 : lane % 2 + lane / 4 % 2 * 2;
    return VOX_LOCAL / 64 * QuadsN * 16 + place * 4 + j * 16;
  }

  // One more term of every sum; of those rows that see it, where some do not.
  template <bool IsMasked, class Rule>
  CANON void step(const float* a, const float* b, const Rule& rule, int32_t k, Sums& p) {
    Quad x[QuadsM], w[QuadsN];
#pragma unroll
    for (int i = 0; i < QuadsM; ++i) x[i] = *(const Quad*)(a + i * 32);
#pragma unroll
    for (int j = 0; j < QuadsN; ++j) w[j] = *(const Quad*)(b + j * 16);
#pragma unroll
    for (int i = 0; i < QuadsM * 4; ++i) {
      if (IsMasked && !Rule::sees(rule, row_of(i), k)) continue;
#pragma unroll
      for (int j = 0; j < QuadsN; ++j)
#pragma unroll
        for (int q = 0; q < 4; ++q)
          p.v[i][j].values[q] = f_fma(x[i / 4].values[i % 4], w[j].values[q], p.v[i][j].values[q]);
    }
  }

  // The terms [first, end) of every sum, of which at least one is there; `first` begins a chunk.
  template <class Left, class Right, class Rule>
  CANON void run(Left& rows, Right& columns, const Rule& rule, int32_t first, int32_t end, float* shared) {
    Sums total;
    Left::load(rows, first, end);
    Right::load(columns, first, end);
    Left::store(rows, shared);
    Right::store(columns, shared + left);
    VOX_BARRIER();
    Sums p;
    int turn = 0;
    for (int32_t k = first; k < end; k += kK, turn ^= 1) {
      if (k % (int32_t)kChunk == 0) {
#pragma unroll
        for (int i = 0; i < QuadsM * 4; ++i)
#pragma unroll
          for (int j = 0; j < QuadsN; ++j) p.v[i][j] = {{0.0f, 0.0f, 0.0f, 0.0f}};
      }
      const bool goes_on = k + kK < end;
      if (goes_on) {
        Left::load(rows, k + kK, end);
        Right::load(columns, k + kK, end);
      }
      const float *a = shared + turn * stage + row_of(0), *b = shared + turn * stage + left + column_of(0);
      const int32_t count = end - k < kK ? end - k : kK;
      if (Rule::masks && !Rule::is_whole(rule, k / (int32_t)kChunk)) {
        for (int i = 0; i < count; ++i)
          step<true>(a + i * (kM + kBroadGap), b + i * (kN + kBroadGap), rule, k + i, p);
      } else if (count == kK) {
#pragma unroll
        for (int i = 0; i < kK; ++i) step<false>(a + i * (kM + kBroadGap), b + i * (kN + kBroadGap), rule, k + i, p);
      } else {
        for (int i = 0; i < count; ++i)
          step<false>(a + i * (kM + kBroadGap), b + i * (kN + kBroadGap), rule, k + i, p);
      }
      if ((k + kK) % (int32_t)kChunk == 0 || !goes_on) {
#pragma unroll
        for (int i = 0; i < QuadsM * 4; ++i) {
          const ChunkGoes to = Rule::chunk_goes(rule, row_of(i), k / (int32_t)kChunk);
#pragma unroll
          for (int j = 0; j < QuadsN; ++j) {
            if (to == kNowhere || ((Totals == 1 || to == kBehindMemory) && !Rule::is_there(rule, row_of(i), column_of(j))))
              continue;
            Quad* place = Rule::place(rule, row_of(i), column_of(j));
            Quad& sum = total.v[i][j];
            if (to == kFirst)
              sum = p.v[i][j];
            else
              sum = Rule::folded(rule, row_of(i), k / (int32_t)kChunk, Totals == 1 || to == kBehindMemory ? *place : sum,
                                 p.v[i][j]);
            if (Totals == 1) *place = sum;
          }
        }
      }
      if (goes_on) {
        float* next = shared + (turn ^ 1) * stage;
        Left::store(rows, next);
        Right::store(columns, next + left);
      }
      VOX_BARRIER();
    }
#pragma unroll
    for (int i = 0; i < QuadsM * 4; ++i)
#pragma unroll
      for (int j = 0; j < QuadsN; ++j)
        if (Rule::is_there(rule, row_of(i), column_of(j)))
          Rule::finish(rule, row_of(i), column_of(j),
                       Totals == 1 ? *Rule::place(rule, row_of(i), column_of(j)) : total.v[i][j]);
  }
};

enum { kBroadTerms = 16 };  // of a stage
typedef Broad<2, 2, kBroadTerms, 1, 0> BroadMany;  // 128 x 64
typedef Broad<1, 2, kBroadTerms, 1, 0> BroadFew;   // 64 x 64: for few columns
enum { kBroadMany = BroadMany::all, kBroadFew = BroadFew::all };

// A product whose rows see every term.
struct PlainRule : AddedChunks {
  float* out;
  int32_t* faults;
  int32_t rows, columns;  // of the result
  int64_t row, column;    // the group's first

  CANON bool is_there(const PlainRule& it, int row, int column) {
    return it.row + row < it.rows && it.column + column < it.columns;
  }
  CANON Quad* place(const PlainRule& it, int row, int column) {
    return (Quad*)(it.out + (it.row + row) * it.columns + it.column + column);
  }
  CANON void finish(const PlainRule& it, int row, int column, const Quad& sum) {
    *place(it, row, column) = sum;
    int32_t* faults = it.faults;
#pragma unroll
    for (int q = 0; q < 4; ++q) VOX_WATCH(sum.values[q], it.row + row);
  }
};

template <class Shape, int kK, class Right>
CANON void broad_product(const float* x, const Piece* weight, const uint16_t* scales, float* out, int32_t* faults,
                         const BroadArgs& args, float* shared) {
  const int64_t row = VOX_GROUP_Y * Shape::kM, column = VOX_GROUP_X * Shape::kN;
  const int64_t left = args.rows - row;
  FloatsAcross<Shape::kM, kK> of_rows;
  FloatsAcross<Shape::kM, kK>::find(of_rows, x + row * args.terms, args.terms,
                                    left < Shape::kM ? (int32_t)left : (int32_t)Shape::kM);
  typename Right::template Stage<Shape::kN, kK> of_columns;
  of_columns.find(of_columns, weight, scales, column, args);
  const PlainRule rule = {{}, out, faults, args.rows, args.columns, row, column};
  Shape::run(of_rows, of_columns, rule, 0, args.terms, shared);
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_BROAD(name, Shape, Right, at_once)                                                                     \
  VOX_KERNEL_AT_ONCE(at_once, name)(VOX_IN(float, x, 0), VOX_IN(Piece, weight, 1), VOX_IN(uint16_t, scales, 2),          \
                              VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(BroadArgs, 5)) {       \
    VOX_SHARED Quad shared[k##Shape];                                                                              \
    broad_product<Shape, kBroadTerms, Right>(x, weight, scales, out, faults, args, (float*)(Quad*)shared);                   \
  }
#define VOX_BROAD_OF(name, Right)      \
  VOX_BROAD(name##_128, BroadMany, Right, 2) \
  VOX_BROAD(name##_64, BroadFew, Right, 3)
VOX_BROAD_OF(vox_broad_back_f16, HalvesBack<PackedF16>)
VOX_BROAD_OF(vox_broad_back_bf16, HalvesBack<PackedBf16>)
VOX_BROAD_OF(vox_broad_back_q8_0, CodesBack)
VOX_BROAD_OF(vox_broad_forth_f16, HalvesForth<PackedF16>)
VOX_BROAD_OF(vox_broad_forth_bf16, HalvesForth<PackedBf16>)
#undef VOX_BROAD_OF
