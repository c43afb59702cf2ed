// What a thread of kernels/step.h does with chunks of one output's weights, for each kind of them: those of any length,
// and whole ones.

namespace vox {
namespace VOX_ISA {

// 16-bit weights: a chunk of one output is 16 pieces.
template <class H>
struct StepHalves {
  // depth: chunks of a thread that are on their way at a time; later: further ones that are asked for into the second
  // cache before the inputs are there. More of either keeps the inputs waiting.
  enum { pieces = 16, depth = 1, later = 0 };
  struct Loaded {
    Piece pieces[16];
  };
  struct Weights {
    const Piece *w0, *w1, *w2;
  };
  struct Input {
    const float* x;
  };
  CANON void load(Loaded& to, const Weights& in, int which, int64_t n, int32_t chunk, int32_t columns) {
    const Piece* w = (which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n, (int64_t)chunk * pieces, columns / 8);
    const int32_t left = columns - chunk * (int32_t)kChunk;
#pragma unroll
    for (int i = 0; i < 16; ++i)
      if (8 * i < left) to.pieces[i] = streamed(w + i * 8);
  }
  // Where a later chunk of the thread lies, and how many of its terms there are: none, or fewer than a chunk's.
  struct Next {
    const Piece* w;
    int32_t left;
  };
  CANON Next next(const Weights& in, int which, int64_t n, int32_t chunk, int32_t columns) {
    return {(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n, (int64_t)chunk * pieces, columns / 8),
            columns - chunk * (int32_t)kChunk};
  }
  // `x`: the chunk's terms. Each piece makes room for one of the next chunk as soon as it is used, so that there
  // are always as many on their way.
  template <class X>
  CANON float dot(Loaded& w, X x, int32_t left, const Next& next) {
    float p = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (8 * i < left) p = HalvesOf<H>::eight(w.pieces[i], x + 8 * i, p);
      if (8 * i < next.left) w.pieces[i] = streamed(next.w + i * 8);
    }
    return p;
  }
};

// Of a chunk's four blocks, as they lie. Taken apart where they are used: a thread that shifted one on arrival would
// wait for memory there.
struct alignas(8) FourScales {
  uint32_t words[2];
};
CANON float scale_of(const FourScales& scales, int b) { return f16_widened(scales.words[b / 2] >> 16 * (b % 2) & 0xFFFFu); }
CANON FourScales streamed(const FourScales* from) {
#if defined(__CUDA_ARCH__)
  FourScales to;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to.words[0]), "=r"(to.words[1]) : "l"(from));
  return to;
#else
  return *from;
#endif
}

// Q8_0: a chunk of one output is four blocks, each two pieces and a scale.
struct StepCodes {
  enum { depth = 2, later = 1 };
  struct Loaded {
    Piece pieces[8];
    FourScales scales;
  };
  struct Weights {
    const Piece *w0, *w1, *w2;
    const uint16_t *d0, *d1, *d2;
  };
  CANON void load(Loaded& to, const Weights& in, int which, int64_t n, int32_t chunk, int32_t columns) {
    const int32_t left = columns / 32 - 4 * chunk;
    const Piece* w = (which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n, (int64_t)chunk * 8, columns / 16);
    const uint16_t* d = (which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2) + scale_at(n, 4 * chunk, columns / 32);
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      if (b >= left) continue;
      to.pieces[2 * b] = streamed(w + 16 * b);
      to.pieces[2 * b + 1] = streamed(w + 16 * b + 8);
    }
    to.scales = streamed((const FourScales*)d);  // there is room for four, always
  }
  CANON void expect(const Weights& in, int which, int64_t n, int32_t chunk, int32_t columns) {
    if (columns / 32 - 4 * chunk < 4) return;
    expected((which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n / 8 * 8, (int64_t)chunk * 8, columns / 16) + n % 8 * 8);
  }
  struct Next {
    const Piece* w;
    const uint16_t* d;
    int32_t left;
  };
  CANON Next next(const Weights& in, int which, int64_t n, int32_t chunk, int32_t columns) {
    return {(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n, (int64_t)chunk * 8, columns / 16),
            (which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2) + scale_at(n, 4 * chunk, columns / 32),
            columns / 32 - 4 * chunk};
  }
  // `codes`, `scales`: of the chunk's four blocks.
  template <class C, class S>
  CANON float dot(Loaded& w, C codes, S scales, int32_t left, const Next& next) {
    float p = 0.0f;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      int32_t dot = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (b < left) {
          const Piece a = *(const Piece*)(codes + 32 * b + 16 * half);
#pragma unroll
          for (int i = 0; i < 4; ++i) dot = dot4(w.pieces[2 * b + half].words[i], a.words[i], dot);
        }
        if (b < next.left) w.pieces[2 * b + half] = streamed(next.w + 16 * b + 8 * half);
      }
      if (b < left) p = block_chained(p, scale_of(w.scales, b), scales[b], dot);
    }
    if (next.left > 0) w.scales = streamed((const FourScales*)next.d);
    return p;
  }
};

// Whole chunks: no place to look at but where a chunk begins. `is_more`: whether there is a next one.
template <class H>
struct WholeHalves {
  // later: chunks of a thread that are asked for into the second cache before the inputs are there; late: further ones
  // when the row is there that is to be normed.
  enum { depth = 1, later = 0, late = 1, pieces = 16 };
  typedef typename StepHalves<H>::Weights Weights;
  struct Loaded {
    Piece pieces[16];
  };
  struct Place {
    const Piece* w;
  };
  CANON Place at(const Weights& in, int which, int64_t n, int32_t chunk, int32_t chunks) {
    return {(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n, (int64_t)chunk * pieces, chunks * pieces)};
  }
  CANON void load(Loaded& to, const Place& from) {
#pragma unroll
    for (int i = 0; i < 16; ++i) to.pieces[i] = streamed(from.w + i * 8);
  }
  CANON void expect(const Place& from) {  // eight threads, of as many outputs, have two lines each
    expected(from.w + (VOX_LOCAL % 8) * 15);
    expected(from.w + (VOX_LOCAL % 8) * 15 + 8);
  }
  template <class X>
  CANON float dot(Loaded& w, X x, bool is_more, const Place& next) {
    float p = 0.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      p = HalvesOf<H>::eight(w.pieces[i], x + 8 * i, p);
      if (is_more) w.pieces[i] = streamed(next.w + i * 8);
    }
    return p;
  }
};
struct WholeCodes {
  enum { depth = 2, later = 1, late = 0, pieces = 8 };
  typedef StepCodes::Weights Weights;
  typedef StepCodes::Loaded Loaded;
  struct Place {
    const Piece* w;
    const FourScales* d;
  };
  CANON Place at(const Weights& in, int which, int64_t n, int32_t chunk, int32_t chunks) {
    return {(which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n, (int64_t)chunk * pieces, chunks * pieces),
            (const FourScales*)((which == 0 ? in.d0 : which == 1 ? in.d1 : in.d2) + scale_at(n, 4 * chunk, 4 * chunks))};
  }
  CANON void load(Loaded& to, const Place& from) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to.pieces[i] = streamed(from.w + i * 8);
    to.scales = streamed(from.d);
  }
  CANON void expect(const Place& from) {  // eight threads, of as many outputs, have a line each
    expected(from.w + (VOX_LOCAL % 8) * 7);
    if (VOX_LOCAL % 8 == 0) expected(from.d);
  }
  template <class C, class S>
  CANON float dot(Loaded& w, C codes, S scales, bool is_more, const Place& next) {
    float p = 0.0f;
#pragma unroll
    for (int b = 0; b < 4; ++b) {
      int32_t dot = 0;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const Piece a = *(const Piece*)(codes + 32 * b + 16 * half);
#pragma unroll
        for (int i = 0; i < 4; ++i) dot = dot4(w.pieces[2 * b + half].words[i], a.words[i], dot);
        if (is_more) w.pieces[2 * b + half] = streamed(next.w + 16 * b + 8 * half);
      }
      p = block_chained(p, scale_of(w.scales, b), scales[b], dot);
    }
    if (is_more) w.scales = streamed(next.d);
    return p;
  }
};

}  // namespace VOX_ISA
}  // namespace vox
