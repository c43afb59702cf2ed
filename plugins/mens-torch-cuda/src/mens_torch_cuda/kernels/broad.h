// Products of many rows in float32, for training: rows with a weight's columns, or with its rows (chains.h); and, for
// attention, rows of which each sees terms of its own (pairs.h).

namespace vox {
namespace VOX_ISA {

struct BroadArgs {  // group (columns, rows); in the order of the result
  int32_t rows;
  int32_t terms;
  int32_t columns;
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

// A product of which each row's terms, and what becomes of its chunks, are a rule's to say.
template <int QuadsM, int QuadsN, int kK>
struct Broad {
  typedef Spread<QuadsM, QuadsN> Lies;
  enum {
    kM = QuadsM * 64,
    kN = QuadsN * 32,
    RM = QuadsM * 4,
    RN = QuadsN * 4,
    left = kK * (kM + kSideGap),
    right = kK * (kN + kSideGap),
    stage = left + right,
    all = 2 * stage / 4,  // quads
  };

  // One more term of every sum; of those rows that see it, where some do not.
  template <bool IsMasked, class Rule>
  CANON void step(const float* a, const float* b, const Rule& rule, int32_t k, float (&p)[RM][RN]) {
    float x[RM], w[RN];
    quads_of<QuadsM, 32>(a, x);
    quads_of<QuadsN, 16>(b, w);
    if (!IsMasked) return outer(x, w, p);
#pragma unroll
    for (int i = 0; i < RM; ++i) {
      if (!Rule::sees(rule, Lies::row(i), k)) continue;
#pragma unroll
      for (int j = 0; j < RN; ++j) p[i][j] = f_fma(x[i], w[j], p[i][j]);
    }
  }
  CANON Quad quad_of(const float* values) { return {{values[0], values[1], values[2], values[3]}}; }

  // What becomes of chunk `chunk`'s chains.
  template <class Rule>
  CANON void fold(const Rule& rule, int32_t chunk, const float (&p)[RM][RN], Quad (&total)[RM][QuadsN]) {
#pragma unroll
    for (int i = 0; i < RM; ++i) {
      const ChunkGoes to = Rule::chunk_goes(rule, Lies::row(i), chunk);
#pragma unroll
      for (int j = 0; j < QuadsN; ++j) {
        const int row = Lies::row(i), column = Lies::column(j);
        if (to == kNowhere || (to == kBehindMemory && !Rule::is_there(rule, row, column))) continue;
        const Quad made = quad_of(p[i] + 4 * j);
        Quad& sum = total[i][j];
        sum = to == kFirst ? made
                           : Rule::folded(rule, row, chunk, to == kBehindMemory ? *Rule::place(rule, row, column) : sum, made);
      }
    }
  }

  // The terms [first, end) of every sum, of which at least one is there; `first` begins a chunk.
  template <class Left, class Right, class Rule>
  CANON void run(Left& rows, Right& columns, const Rule& rule, int32_t first, int32_t end, float* shared) {
    auto next = [&](int32_t k) {
      if (k >= end) return;
      Left::load(rows, k, end);
      Right::load(columns, k, end);
    };
    auto put = [&](int32_t k, int turn) {
      if (k < end) {
        Left::store(rows, shared + turn * stage);
        Right::store(columns, shared + turn * stage + left);
      }
      VOX_BARRIER();
    };
    Quad total[RM][QuadsN];
    const float *a = shared + Lies::row(0), *b = shared + left + Lies::column(0);
    next(first);
    put(first, 0);
    for (int32_t from = first; from < end; from += (int32_t)kChunk) {
      float p[RM][RN];
#pragma unroll
      for (int i = 0; i < RM; ++i)
#pragma unroll
        for (int j = 0; j < RN; ++j) p[i][j] = 0.0f;
      const int32_t chunk = from / (int32_t)kChunk, last = end - from < (int32_t)kChunk ? end : from + (int32_t)kChunk;
      const bool is_masked = Rule::masks && !Rule::is_whole(rule, chunk);
#pragma unroll 1
      for (int32_t k = from, turn = 0; k < last; k += kK, turn ^= 1) {
        next(k + kK);
        const float *x = a + turn * stage, *w = b + turn * stage;
        const int32_t count = last - k < kK ? last - k : kK;
        if (is_masked) {
          for (int i = 0; i < count; ++i) step<true>(x + i * (kM + kSideGap), w + i * (kN + kSideGap), rule, k + i, p);
        } else if (count == kK) {
#pragma unroll
          for (int i = 0; i < kK; ++i) step<false>(x + i * (kM + kSideGap), w + i * (kN + kSideGap), rule, k + i, p);
        } else {
          for (int i = 0; i < count; ++i) step<false>(x + i * (kM + kSideGap), w + i * (kN + kSideGap), rule, k + i, p);
        }
        put(k + kK, turn ^ 1);
      }
      fold(rule, chunk, p, total);
    }
#pragma unroll
    for (int i = 0; i < RM; ++i)
#pragma unroll
      for (int j = 0; j < QuadsN; ++j)
        if (Rule::is_there(rule, Lies::row(i), Lies::column(j)))
          Rule::finish(rule, Lies::row(i), Lies::column(j), total[i][j]);
  }
};

enum { kBroadTerms = 16 };  // of a stage
typedef Broad<1, 2, kBroadTerms> BroadFew;  // 64 x 64
enum { kBroadFew = BroadFew::all };

// Stores a product.
struct Stored {
  float* out;
  int32_t* faults;
  int32_t rows, columns;  // of the result
  int64_t row, column;    // the group's first

  CANON void take(const Stored& it, int row, int column, const Quad& sum) {
    const int64_t r = it.row + row, c = it.column + column;
    if (r >= it.rows || c >= it.columns) return;
    *(Quad*)(it.out + r * it.columns + c) = sum;
    int32_t* faults = it.faults;
#pragma unroll
    for (int q = 0; q < 4; ++q) VOX_WATCH(sum.values[q], r);
  }
};

template <class Shape, class Right>
CANON void broad_product(const float* x, const Piece* weight, const uint16_t* scales, float* out, int32_t* faults,
                         const BroadArgs& args, float* shared) {
  const int64_t row = VOX_GROUP_Y * Shape::kM, column = VOX_GROUP_X * Shape::kN;
  const int64_t left = args.rows - row;
  FloatsAcross<Shape::kM, Shape::kTerms> of_rows;
  of_rows.find(of_rows, x + row * args.terms, args.terms, left < Shape::kM ? (int32_t)left : (int32_t)Shape::kM);
  typename Right::template Stage<Shape::kN, Shape::kTerms> of_columns;
  of_columns.find(of_columns, weight, scales, column, {args.terms, args.columns});
  const Stored ends = {out, faults, args.rows, args.columns, row, column};
  Shape::run(of_rows, of_columns, args.terms, ends, shared);
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_BROAD(name, size, Right, at_once)                                                                       \
  VOX_ASKS(name##_##size, kProduct##size)                                                                           \
  VOX_KERNEL_AT_ONCE(at_once, name##_##size)(VOX_IN(float, x, 0), VOX_IN(Piece, weight, 1),                         \
                                             VOX_IN(uint16_t, scales, 2), VOX_OUT(float, out, 3),                   \
                                             VOX_OUT(int32_t, faults, 4), VOX_ARGS(BroadArgs, 5)) {                 \
    VOX_ASKED(kProduct##size, shared);                                                                              \
    broad_product<Product##size, Right>(x, weight, scales, out, faults, args, (float*)(Quad*)shared);               \
  }
#define VOX_BROAD_OF(name, Right)  \
  VOX_BROAD(name, Low, Right, 4)   \
  VOX_BROAD(name, High, Right, 2)  \
  VOX_BROAD(name, Most, Right, 2)
VOX_BROAD_OF(vox_broad_back_f16, HalvesBack<PackedF16>)
VOX_BROAD_OF(vox_broad_back_bf16, HalvesBack<PackedBf16>)
VOX_BROAD_OF(vox_broad_back_q8_0, CodesBack)
VOX_BROAD_OF(vox_broad_forth_f16, HalvesForth<PackedF16>)
VOX_BROAD_OF(vox_broad_forth_bf16, HalvesForth<PackedBf16>)
#undef VOX_BROAD_OF
#undef VOX_BROAD
