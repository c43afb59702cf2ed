// Products of many rows in float32: C128 of rows with a weight's columns, or with its rows, for prompts and for
// training. Compiled behind packed.h, in the same text.
//
// A group makes kM x kN outputs, a thread QuadsM x QuadsN squares of 4 x 4. Terms come through shared memory, in
// float32 and output beside output, kK at a time and one stage ahead; each output is one chain over its chunk of 128
// terms, and its chunks are folded in their order. What is beyond the last term takes no part.
//
// How fast it is hangs on the registers' two banks, the even and the odd ones: an fma reads one of each in a cycle,
// so one of its three operands must be the last fma's, kept. Hence the order of the fmas (`outer`), sides that lie
// term by term, so that neighbours are of different banks, and how sums lie in shared memory.

namespace vox {
namespace VOX_ISA {

struct SideOf {
  int32_t terms;    // of a product
  int32_t columns;  // of its result
};

// Whether a place of a thread's, VOX_LOCAL and more, is one of so many: not asked where every thread has one.
#define VOX_HERE(at, count) ((count) % kGroup == 0 || (at) < (count))

enum { kSideGap = 4 };  // floats between rows of a stage: threads that write, and quads, use different banks

// A stage of a side in float32 whose terms lie one behind the other, [outputs][terms] in memory: as [kK][kOut].
template <int kOut, int kK>
struct FloatsAcross {
  enum { pitch = kOut + kSideGap, of_output = kK / 4, quads = kOut * of_output, each = (quads + kGroup - 1) / kGroup };
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
      if (VOX_HERE(at, quads) && k + at % of_output * 4 < end) it.held[i] = *(const Quad*)(it.from[i] + k);
    }
  }
  CANON void store(const FloatsAcross& it, float* to) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup;
      if (!VOX_HERE(at, quads)) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) to[(at % of_output * 4 + j) * pitch + at / of_output] = it.held[i].values[j];
    }
  }
};

// The same of a side that is [terms][outputs] in memory.
template <int kOut, int kK>
struct FloatsAlong {
  enum { pitch = kOut + kSideGap, of_term = kOut / 4, quads = kK * of_term, each = (quads + kGroup - 1) / kGroup };
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
      if (VOX_HERE(at, quads) && k + at / of_term < end) it.held[i] = *(const Quad*)(it.from[i] + k * it.stride);
    }
  }
  CANON void store(const FloatsAlong& it, float* to) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int at = VOX_LOCAL + i * kGroup;
      if (VOX_HERE(at, quads)) *(Quad*)(to + at / of_term * pitch + at % of_term * 4) = it.held[i];
    }
  }
};

// A stage of packed 16-bit weights whose outputs are the terms: [kK outputs][kN columns].
template <class F>
struct HalvesBack {
  template <int kN, int kK>
  struct Stage {
    enum { pitch = kN + kSideGap, pieces = kN / 8 * kK, each = (pieces + kGroup - 1) / kGroup };
    const Piece* from[each];
    int64_t stride;
    Piece held[each];

    CANON void find(Stage& it, const Piece* weight, const uint16_t*, int64_t column, const SideOf& args) {
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
        if (VOX_HERE(at, pieces) && k + at / kN * 8 < end) it.held[i] = it.from[i][k * it.stride];
      }
    }
    CANON void store(const Stage& it, float* to) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (!VOX_HERE(at, pieces)) continue;
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
    enum { pitch = kN + kSideGap, pieces = kN / 8 * kK, each = (pieces + kGroup - 1) / kGroup };
    const Piece* from[each];
    Piece held[each];

    CANON void find(Stage& it, const Piece* weight, const uint16_t*, int64_t column, const SideOf& args) {
      // Outputs are padded to a multiple of 64: what is there is zero, and not stored.
      const int64_t last = ((int64_t)args.columns + 63) / 64 * 64 - 1;
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        const int64_t output = column + at % kN;
        it.from[i] = weight + piece_at(output < last ? output : last, at / kN, args.terms / 8);
      }
    }
    CANON void load(Stage& it, int32_t k, int32_t end) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (VOX_HERE(at, pieces) && k + at / kN * 8 < end) it.held[i] = it.from[i][k];
      }
    }
    CANON void store(const Stage& it, float* to) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (!VOX_HERE(at, pieces)) continue;
        float* place = to + at / kN * 8 * pitch + at % kN;
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
    enum { pitch = kN + kSideGap, halves = kN / 8 * kK, each = (halves + kGroup - 1) / kGroup };
    struct alignas(8) Half {
      uint32_t words[2];
    };
    const Half* from[each];
    const uint16_t* scale[each];
    int64_t stride, of_scales;
    Half held[each];
    uint16_t d[each];

    // Eight codes of an output: [outputs / 8][pieces][output][half].
    CANON void find(Stage& it, const Piece* weight, const uint16_t* scales, int64_t column, const SideOf& args) {
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
        if (!VOX_HERE(at, halves) || k + at / kN * 8 >= end) continue;
        it.held[i] = it.from[i][k * it.stride];
        it.d[i] = it.scale[i][k * it.of_scales];
      }
    }
    CANON void store(const Stage& it, float* to) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
        const int at = VOX_LOCAL + i * kGroup;
        if (!VOX_HERE(at, halves)) continue;
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

// Every chain's next term: all rows of one column, then those of the next one backwards, so that each fma shares an
// operand with the one before it.
template <int RM, int RN>
CANON void outer(const float* x, const float* w, float (&p)[RM][RN]) {
#pragma unroll
  for (int j = 0; j < RN; ++j)
#pragma unroll
    for (int i = 0; i < RM; ++i) {
      const int row = j % 2 == 0 ? i : RM - 1 - i;
      p[row][j] = f_fma(x[row], w[j], p[row][j]);
    }
}

// So many quads of a stage, `Apart` floats apart.
template <int Quads, int Apart>
CANON void quads_of(const float* from, float* to) {
#pragma unroll
  for (int i = 0; i < Quads; ++i) {
    const Quad quad = *(const Quad*)(from + i * Apart);
#pragma unroll
    for (int q = 0; q < 4; ++q) to[4 * i + q] = quad.values[q];
  }
}

// Where a thread's outputs lie in its group's. A warp's lanes lie eight by four; two warps lie side by side over the
// rows, and two over the columns. Lanes that differ in bit 0 read the same rows, in bit 1 the same columns: so
// sixteen lanes read one side at once.
template <int QuadsM, int QuadsN>
struct Spread {
  CANON int row(int i) {
    const int lane = VOX_LOCAL % 32, place = lane / 2 % 2 + lane / 8 * 2;
    return VOX_LOCAL / 32 % 2 * QuadsM * 32 + place * 4 + i / 4 * 32 + i % 4;
  }
  CANON int column(int quad) {
    const int lane = VOX_LOCAL % 32, place = lane % 2 + lane / 4 % 2 * 2;
    return VOX_LOCAL / 64 * QuadsN * 16 + place * 4 + quad * 16;
  }
};

// `AreAside`: sums of chunks lie in shared memory, and a thread's registers are its chains'.
template <int QuadsM, int QuadsN, int kK, bool AreAside>
struct Product {
  typedef Spread<QuadsM, QuadsN> Lies;
  enum {
    kM = QuadsM * 64,
    kN = QuadsN * 32,
    RM = QuadsM * 4,
    RN = QuadsN * 4,
    kTerms = kK,  // of a stage: a chunk is an even number of them
    left = kK * (kM + kSideGap),
    right = kK * (kN + kSideGap),
    stage = left + right,
    quads = (2 * stage + (AreAside ? kM * kN : 0)) / 4,
  };
  struct Sums {
    float values[AreAside ? 1 : RM][AreAside ? 1 : RN];
  };

  // A chunk's chains join their sums. Aside, a quad is of four rows, exchanged in pairs: a chain and its row's term
  // are then in different banks.
  template <bool IsFirst>
  CANON void fold(const float (&p)[RM][RN], Sums& total, float* aside) {
#pragma unroll
    for (int j = 0; j < RN; ++j)
#pragma unroll
      for (int i = 0; i < RM; i += 4) {
        if (AreAside) {
          Quad* place = (Quad*)aside + (i / 4 * RN + j) * kGroup;
          Quad y = {};
          if (!IsFirst) y = *place;
#pragma unroll
          for (int q = 0; q < 4; ++q) y.values[q] = chunk_folded(IsFirst, y.values[q], p[i + (q ^ 1)][j]);
          *place = y;
        } else {
#pragma unroll
          for (int q = 0; q < 4; ++q) {
            float& y = total.values[AreAside ? 0 : i + q][AreAside ? 0 : j];
            y = chunk_folded(IsFirst, y, p[i + q][j]);
          }
        }
      }
  }
  CANON Quad sum(const Sums& total, const float* aside, int i, int quad) {
    Quad y;
#pragma unroll
    for (int q = 0; q < 4; ++q)
      y.values[q] = AreAside ? aside[(i / 4 * RN + 4 * quad + q) * 4 * kGroup + (i % 4 ^ 1)]
                             : total.values[AreAside ? 0 : i][AreAside ? 0 : 4 * quad + q];
    return y;
  }

  // `terms` terms; `Ends` takes four sums of a row.
  template <class Left, class Right, class Ends>
  CANON void run(Left& rows, Right& columns, int32_t terms, const Ends& ends, float* shared) {
    float* aside = shared + 2 * stage + VOX_LOCAL * 4;
    const float *a = shared + Lies::row(0), *b = shared + left + Lies::column(0);
    // The stage from term k on, which is there or not. Where it must be, nothing is asked: behind a branch the compiler
    // puts loads off until they are stored.
    auto next = [&](bool is_there, int32_t k) {
      if (!is_there) return;
      Left::load(rows, k, terms);
      Right::load(columns, k, terms);
    };
    auto put = [&](bool is_there, int turn) {
      if (is_there) {
        Left::store(rows, shared + turn * stage);
        Right::store(columns, shared + turn * stage + left);
      }
      VOX_BARRIER();
    };
    Sums total = {};
    next(true, 0);
    put(true, 0);
    for (int32_t first = 0; first < terms; first += (int32_t)kChunk) {
      float p[RM][RN];
#pragma unroll
      for (int i = 0; i < RM; ++i)
#pragma unroll
        for (int j = 0; j < RN; ++j) p[i][j] = 0.0f;
      auto term = [&](int turn, int k) {
        float x[RM], w[RN];
        quads_of<QuadsM, 32>(a + turn * stage + k * (kM + kSideGap), x);
        quads_of<QuadsN, 16>(b + turn * stage + k * (kN + kSideGap), w);
        outer(x, w, p);
      };
      if (terms - first >= (int32_t)kChunk) {
#pragma unroll 1
        for (int32_t k = first; k < first + (int32_t)kChunk; k += 2 * kK) {
#pragma unroll
          for (int turn = 0; turn < 2; ++turn) {
            const bool goes_on = turn == 0 || k + 2 * kK < terms;
            next(goes_on, k + (turn + 1) * kK);
#pragma unroll
            for (int i = 0; i < kK; ++i) term(turn, i);
            put(goes_on, turn ^ 1);
          }
        }
      } else {
#pragma unroll 1
        for (int32_t k = first, turn = 0; k < terms; k += kK, turn ^= 1) {
          const bool goes_on = k + kK < terms;
          next(goes_on, k + kK);
#pragma unroll 1
          for (int i = 0; i < (terms - k < kK ? terms - k : kK); ++i) term(turn, i);
          put(goes_on, turn ^ 1);
        }
      }
      if (first == 0)
        fold<true>(p, total, aside);
      else
        fold<false>(p, total, aside);
    }
#pragma unroll
    for (int i = 0; i < RM; ++i)
#pragma unroll
      for (int j = 0; j < QuadsN; ++j) Ends::take(ends, Lies::row(i), Lies::column(j), sum(total, aside, i, j));
  }
};

typedef Product<1, 2, 16, false> ProductLow;   // 64 x 64
typedef Product<2, 2, 16, false> ProductHigh;  // 128 x 64
typedef Product<2, 4, 16, true> ProductMost;   // 128 x 128
enum { kProductLow = ProductLow::quads, kProductHigh = ProductHigh::quads, kProductMost = ProductMost::quads };

}  // namespace VOX_ISA
}  // namespace vox
