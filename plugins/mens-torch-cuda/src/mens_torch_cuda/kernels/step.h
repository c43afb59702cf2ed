// Linear layers of one row, with what stands before and behind them: a norm (and int8 codes) of the input in
// front, a residual or a gate at the end. Every value is made by the operators' own sequence; what is saved is
// launches and memory. Each kernel starts while the one before it ends (`wait_for_inputs`), and has its first
// weights on their way by then: weights are no one's output.

// A kernel of which a multiprocessor shall run so many groups at once: a bound on registers.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define VOX_KERNEL_AT_ONCE(groups, name) extern "C" __global__ __launch_bounds__(kGroup, groups) void name
#else
#define VOX_KERNEL_AT_ONCE(groups, name) extern "C" __global__ void name
#endif

// Shared memory, of which the launch gives more than a text can declare. Where kernels run as C++ each says how much.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define VOX_ASKED(quads, name) extern __shared__ Quad name[]
#define VOX_ASKS(kernel, quads)
#define VOX_ASKS_AT_MOST(kernel, quads)
#else
#define VOX_ASKED(quads, name) VOX_SHARED Quad name[quads]
#define VOX_ASKS(kernel, quads) extern "C" { int32_t kernel##_asks = 16 * (quads); }
#define VOX_ASKS_AT_MOST(kernel, quads) extern "C" { int32_t kernel##_asks_at_most = 16 * (quads); }
#endif

namespace vox {
namespace VOX_ISA {

// Until here, nothing that an earlier kernel writes may be read, and nothing written.
CANON void inputs_are_there() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start when all groups said so, or ended: earlier, its groups would take the place of this
// one's, and its first weights that of this one's inputs.
CANON void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
CANON void wait_for_inputs() {
  inputs_are_there();
  let_next_start();
}

// A load that stays where it is written, before barriers and before it is used.
CANON float early(const float* from) {
#if defined(__CUDA_ARCH__)
  float to;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(to) : "l"(from));
  return to;
#else
  return *from;
#endif
}

// Weights are read once: they need no place in the first cache. Volatile, so that it stays before a barrier.
CANON Piece streamed(const Piece* from) {
#if defined(__CUDA_ARCH__)
  Piece to;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3])
               : "l"(from));
  return to;
#else
  return *from;
#endif
}

// On its way into the second cache.
CANON void expected(const void* line) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

// Sixteen bytes, on their way into shared memory through no register. `arrived_all` and a barrier end the way.
CANON void sent(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
#else
  for (int i = 0; i < 4; ++i) ((uint32_t*)to)[i] = ((const uint32_t*)from)[i];
#endif
}
// The same by way of the first cache: groups of a multiprocessor that ask for a long row ask the second cache once.
CANON void sent_shared(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
#else
  sent(to, from);
#endif
}
CANON void arrived_all() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// What threads of one warp wrote before is there for the others.
CANON void warp_barrier() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#else
  VOX_BARRIER();
#endif
}

enum {
  kRowStaged8 = kGroup / 8 * kStride / 4,  // quads
  kRowStaged16 = kGroup / 16 * kStride / 4,
  kNormChunks = 48,              // of a row that it norms
  kNormStaged = kNormChunks * kStride,
  kNormStagedQuads = kNormStaged / 4,
  kNormSumQuads = kNormChunks / 4,
  kNormBlocks = kNormChunks * 4,
  kNormPartials = 2 * kNormChunks * 32,  // at most so many partial sums of a group, [chunks][outputs]
  kNormAhead = kNormPartials + 1536,  // weights of a norm; afterwards partial sums
  kNormAheadQuads = kNormAhead / 4,
  kRowChunks = 224,
  kRowPartials = kRowChunks * 16,
  kRowCodeQuads = kRowChunks * (int)kChunk / 16,
  kRowScaleQuads = kRowChunks,
  kTwoGroups = 2 * kGroup,
  kStore = 0,
  kAddResidual = 1,
  kSiluGate = 2,
  kGeluGate = 3,
};

struct StepArgs {  // group (outputs of one of three weights, and every `groups`th behind them); a gate: of both
  int32_t outputs0, outputs1, outputs2;
  int32_t columns;
  int32_t mode;
  int32_t codes_out;  // whether a gate's outputs are wanted as int8 codes too
  int32_t groups;     // that were started
  float eps;
};

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

// A norm's weights on their way, as many as there is room for: they are no one's output.
CANON void sent_norm(const float* weight, int32_t columns, float* ahead) {
  for (int32_t i = VOX_LOCAL * 4; i < columns && i < kNormAhead; i += kGroup * 4) sent(ahead + i, weight + i);
}

// A chunk's sum of squares, of whole quads: the next `Together` are on their way while as many are added.
template <int Together>
CANON float squares_of(const float* terms, int32_t count) {
  Quad now[Together], then[Together];
  float p = 0.0f;
#pragma unroll
  for (int i = 0; i < Together; ++i)
    if (4 * i < count) then[i] = *(const Quad*)(terms + 4 * i);
#pragma unroll 2
  for (int32_t k = 0; k < count; k += 4 * Together) {
#pragma unroll
    for (int i = 0; i < Together; ++i) {
      now[i] = then[i];
      if (k + 4 * (Together + i) < count) then[i] = *(const Quad*)(terms + k + 4 * (Together + i));
    }
#pragma unroll
    for (int i = 0; i < Together; ++i) {
      if (k + 4 * i >= count) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) p = SumOfSquares::step(now[i].values[j], p);
    }
  }
  return p;
}

// A row is staged chunk by chunk in kStride floats.
CANON float* staged_at(float* staged, int32_t i) { return staged + i / (int32_t)kChunk * kStride + i % (int32_t)kChunk; }

enum { kStagedApart = kGroup * 4 / (int)kChunk * kStride };  // of a thread's quads
struct NormOf {
  float inverse;
  bool is_whole;  // An infinite sum makes every output zero, and would hide: the row is NaN instead.
};
// The row is staged, and what it is normed by is known. `later`: what is asked for when the row is there.
template <class Later>
CANON NormOf staged_row(const float* x, int32_t columns, float eps, float* staged, float* sums, Later later) {
  const int32_t chunks = (columns - 1) / (int32_t)kChunk + 1;
  float* at = staged_at(staged, VOX_LOCAL * 4);
  for (int32_t i = VOX_LOCAL * 4, k = 0; i < columns; i += kGroup * 4, k += kStagedApart) sent_shared(at + k, x + i);
  arrived_all();
  let_next_start();
  VOX_BARRIER();
  later();
  if (VOX_LOCAL < chunks) {
    const int32_t left = columns - VOX_LOCAL * (int32_t)kChunk;
    const float* own = staged + VOX_LOCAL * kStride;
    sums[VOX_LOCAL] = left < (int32_t)kChunk ? squares_of<2>(own, left) : squares_of<4>(own, kChunk);
  }
  VOX_BARRIER();
  float sum = 0.0f;
#pragma unroll 4
  for (int32_t c = 0; c < chunks; c += 4) {
    const Quad some = *(const Quad*)(sums + c);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (c + j < chunks) sum = chunk_folded(c + j == 0, sum, some.values[j]);
  }
  return {norm_inverse(sum, (float)columns, eps), is_finite(sum)};
}

// The normed row in the row's place; the first weights are `ahead`. Ends with a barrier.
CANON void staged_norm(const float* weight, int32_t columns, const NormOf& norm, const float* ahead, float* staged,
                       int32_t* faults, int64_t row, bool watches) {
  bool is_odd = !norm.is_whole;
  float* at = staged_at(staged, VOX_LOCAL * 4);
#pragma unroll 4
  for (int32_t i = VOX_LOCAL * 4, k = 0; i < columns; i += kGroup * 4, k += kStagedApart) {
    const Quad w = i < kNormAhead ? *(const Quad*)(ahead + i) : *(const Quad*)(weight + i);
    Quad q = *(const Quad*)(at + k);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      q.values[j] = norm.is_whole ? normed(q.values[j], norm.inverse, w.values[j]) : f_from(0x7FC00000);
      if (watches) is_odd = is_odd || !is_finite(q.values[j]);
    }
    *(Quad*)(at + k) = q;
  }
  if (watches && is_odd) faults[row] = 1;
  VOX_BARRIER();
}

// The int8 codes of the normed row: a chunk's 128 bytes where its first floats were. Two threads, of one warp, have a
// block. They begin at different quads, which lie in different banks. Ends with a barrier.
CANON void staged_codes(const float* weight, int32_t columns, const NormOf& norm, const float* ahead, float* staged,
                        float* scales, int32_t* magnitudes, int32_t* faults, int64_t row, bool watches) {
  const float inverse = norm.is_whole ? norm.inverse : f_from(0x7FC00000);
  bool is_odd = !norm.is_whole;
  float* own = staged_at(staged, VOX_LOCAL * 16);
  uint32_t* codes = (uint32_t*)(staged + VOX_LOCAL / 8 * kStride) + VOX_LOCAL % 8 * 4;
  int32_t places[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) places[j] = (VOX_LOCAL / 2 + j) % 4;
  enum { apart = kGroup * 16 / (int)kChunk * kStride };
  int32_t i = VOX_LOCAL * 16;
#pragma unroll 1
  for (int32_t round = 0; i - VOX_LOCAL * 16 < columns; i += kGroup * 16, ++round, own += apart, codes += apart) {
    const bool is_there = i < columns;
    int32_t* of_round = magnitudes + (round & 1) * kGroup;
    Quad y[4], w[4];
    int32_t amax = 0;
    if (is_there) {
      if (i < kNormAhead) {
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = *(const Quad*)(ahead + i + 4 * places[j]);
      } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) w[j] = *(const Quad*)(weight + i + 4 * places[j]);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        y[j] = *(const Quad*)(own + 4 * places[j]);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          y[j].values[k] = normed(y[j].values[k], inverse, w[j].values[k]);
          const int32_t magnitude = f_bits(y[j].values[k]) & 0x7FFFFFFF;
          amax = magnitude > amax ? magnitude : amax;
        }
      }
    }
    of_round[VOX_LOCAL] = amax;
    warp_barrier();  // a chunk's threads are in one warp: all of it is read
    if (is_there) {
      const int32_t other = of_round[VOX_LOCAL ^ 1];
      amax = other > amax ? other : amax;
      is_odd = is_odd || amax >= 0x7F800000;
      const float d = activation_scale(amax);
      const float by = has_codes(d) ? activation_inverse(amax) : 0.0f;
      if (VOX_LOCAL % 2 == 0) scales[i / 32] = d;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        uint32_t word = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) word |= ((uint32_t)activation_code(y[j].values[k], by) & 255u) << 8 * k;
        codes[places[j]] = has_codes(d) ? word : 0u;
      }
    }
  }
  if (watches && is_odd) faults[row] = 1;
  VOX_BARRIER();
}

// Which of the weights side by side a group works for, and which of its outputs come first. None: a fourth weight.
struct StepPlace {
  int which;
  int32_t group;
};
template <int T>
CANON StepPlace step_place(const StepArgs& args, int32_t group) {
  const int32_t groups0 = (args.outputs0 + T - 1) / T;
  if (args.mode >= kSiluGate) return {group < groups0 ? 0 : 3, group};
  if (group < groups0) return {0, group};
  const int32_t groups1 = (args.outputs1 + T - 1) / T, groups2 = (args.outputs2 + T - 1) / T;
  if (group < groups0 + groups1) return {1, group - groups0};
  group -= groups0 + groups1;
  return {group < groups2 ? 2 : 3, group};
}

struct StepOut {
  const float* residual;
  float *out0, *out1, *out2;
  int8_t* codes;
  float* scales;
  int32_t *faults0, *faults1, *faults2;
};

// Fold what the slices made, and write. `partials` [chunks of all weights][T].
template <int T>
CANON void step_end(const StepArgs& args, const StepPlace& at, const StepOut& to, const float* partials, float* exchange,
                    float residual) {
  const int lane = VOX_LOCAL % T, slice = VOX_LOCAL / T;
  const int32_t chunks = (args.columns - 1) / (int32_t)kChunk + 1;
  const int64_t n = (int64_t)at.group * T + lane, row = VOX_GROUP_Y;
  const bool is_gate = args.mode >= kSiluGate;
  VOX_BARRIER();
  float total = 0.0f;
  if (slice < (is_gate ? 2 : 1)) {
    const float* mine = partials + slice * chunks * T + lane;
#pragma unroll 8
    for (int32_t c = 0; c < chunks; ++c) total = chunk_folded(c == 0, total, mine[c * T]);
  }
  if (!is_gate) {
    const int32_t outputs = at.which == 0 ? args.outputs0 : at.which == 1 ? args.outputs1 : args.outputs2;
    if (slice != 0 || n >= outputs) return;
    float* out = at.which == 0 ? to.out0 : at.which == 1 ? to.out1 : to.out2;
    int32_t* faults = at.which == 0 ? to.faults0 : at.which == 1 ? to.faults1 : to.faults2;
    VOX_WATCH(total, row);
    if (args.mode == kAddResidual) {
      total = f_add(residual, total);
      if (!is_finite(total)) to.faults1[row] = 1;
    }
    out[row * outputs + n] = total;
    return;
  }
  const bool is_inside = n < args.outputs0;
  if (slice < 2) {
    if (is_inside && !is_finite(total)) (slice == 0 ? to.faults0 : to.faults1)[row] = 1;
    exchange[VOX_LOCAL] = total;
  }
  VOX_BARRIER();
  float y = 0.0f;
  if (slice == 0 && is_inside) {
    const float up = exchange[T + lane];
    y = args.mode == kSiluGate ? silu_gated(total, up) : gelu_gated(total, up);
    if (!is_finite(y)) to.faults2[row] = 1;
    to.out0[row * args.outputs0 + n] = y;
  }
  if (args.codes_out == 0) return;
  // T is 32: the group's outputs are one block.
  int32_t* magnitudes = (int32_t*)exchange + 2 * T;
  if (slice == 0) magnitudes[lane] = f_bits(y) & 0x7FFFFFFF;
  VOX_BARRIER();
  if (slice != 0 || !is_inside) return;
  int32_t amax = 0;
#pragma unroll
  for (int i = 0; i < T; ++i) amax = magnitudes[i] > amax ? magnitudes[i] : amax;
  const float d = activation_scale(amax);
  if (lane == 0) to.scales[row * (args.outputs0 / 32) + at.group] = d;
  to.codes[row * args.outputs0 + n] = has_codes(d) ? (int8_t)activation_code(y, activation_inverse(amax)) : (int8_t)0;
}

// Where a row's terms come from, for each kind of weight.
template <int T>
struct RowOfFloats {
  const float* x;
  float* staged;  // a chunk for each slice; a warp has those of its own slices
  struct Ahead {
    Quad quads[32 / T];
  };
  CANON void expect(const RowOfFloats&, const StepArgs&) {}
  template <class Later>
  CANON void prepare(const RowOfFloats&, const StepArgs&, Later) {}
  // A warp reads its chunks side by side, one quad a thread and chunk; `v` is the thread's own chunk.
  CANON void fetch(const RowOfFloats& in, const StepArgs& args, int32_t v, Ahead& to) {
    const int32_t first = v - VOX_LOCAL % 32 / T, chunks = (args.columns - 1) / (int32_t)kChunk + 1;
#pragma unroll
    for (int i = 0; i < 32 / T; ++i) {
      const int32_t chunk = first + i < chunks ? first + i : first + i - chunks;  // of a gate's other weight
      const int32_t k = chunk * (int32_t)kChunk + VOX_LOCAL % 32 * 4;
      if (k < args.columns) to.quads[i] = *(const Quad*)(in.x + k);
    }
  }
  CANON void put(const RowOfFloats& in, const Ahead& from) {
    warp_barrier();
#pragma unroll
    for (int i = 0; i < 32 / T; ++i)
      *(Quad*)(in.staged + (VOX_LOCAL / 32 * (32 / T) + i) * kStride + VOX_LOCAL % 32 * 4) = from.quads[i];
    let_next_start();
    warp_barrier();
  }
  template <class H>
  CANON float dot(const RowOfFloats& in, typename StepHalves<H>::Loaded& w, int32_t c, int32_t columns,
                  const typename StepHalves<H>::Next& next) {
    return StepHalves<H>::dot(w, in.staged + VOX_LOCAL / T * kStride, columns - c * (int32_t)kChunk, next);
  }
  template <class F>
  CANON float whole(const RowOfFloats& in, typename F::Loaded& w, int32_t, bool is_more, const typename F::Place& next) {
    return F::dot(w, in.staged + VOX_LOCAL / T * kStride, is_more, next);
  }
};
struct NormedFloats {
  const float *x, *norm;
  float *ahead, *staged, *sums;
  int32_t* faults;
  CANON void expect(const NormedFloats& in, const StepArgs& args) { sent_norm(in.norm, args.columns, in.ahead); }
  template <class Later>
  CANON void prepare(const NormedFloats& in, const StepArgs& args, Later later) {
    const NormOf norm = staged_row(in.x, args.columns, args.eps, in.staged, in.sums, later);
    staged_norm(in.norm, args.columns, norm, in.ahead, in.staged, in.faults, VOX_GROUP_Y, VOX_GROUP_X == 0);
  }
  struct Ahead {};
  CANON void fetch(const NormedFloats&, const StepArgs&, int32_t, Ahead&) {}
  CANON void put(const NormedFloats&, const Ahead&) {}
  template <class H>
  CANON float dot(const NormedFloats& in, typename StepHalves<H>::Loaded& w, int32_t c, int32_t columns,
                  const typename StepHalves<H>::Next& next) {
    return StepHalves<H>::dot(w, in.staged + c * kStride, columns - c * (int32_t)kChunk, next);
  }
  template <class F>
  CANON float whole(const NormedFloats& in, typename F::Loaded& w, int32_t c, bool is_more, const typename F::Place& next) {
    return F::dot(w, in.staged + c * kStride, is_more, next);
  }
};
// `row`, `row_scales`: where the codes are; `codes`, `scales`: shared memory for them.
struct RowOfCodes {
  const int8_t* row;
  const float* row_scales;
  int8_t* codes;
  float* scales;
  CANON void expect(const RowOfCodes&, const StepArgs&) {}
  template <class Later>
  CANON void prepare(const RowOfCodes& in, const StepArgs& args, Later) {
    const int32_t blocks = args.columns / 32, whole = blocks / 4 * 4;
    for (int32_t i = VOX_LOCAL * 16; i < args.columns; i += kGroup * 16) sent(in.codes + i, in.row + i);
    for (int32_t b = VOX_LOCAL * 4; b < whole; b += kGroup * 4) sent(in.scales + b, in.row_scales + b);
    if (VOX_LOCAL < blocks - whole) in.scales[whole + VOX_LOCAL] = in.row_scales[whole + VOX_LOCAL];
    arrived_all();
    let_next_start();
    VOX_BARRIER();
  }
  struct Ahead {};
  CANON void fetch(const RowOfCodes&, const StepArgs&, int32_t, Ahead&) {}
  CANON void put(const RowOfCodes&, const Ahead&) {}
  template <class H>
  CANON float dot(const RowOfCodes& in, StepCodes::Loaded& w, int32_t c, int32_t columns, const StepCodes::Next& next) {
    return StepCodes::dot(w, in.codes + c * (int32_t)kChunk, in.scales + 4 * c, columns / 32 - 4 * c, next);
  }
  template <class F>
  CANON float whole(const RowOfCodes& in, typename F::Loaded& w, int32_t c, bool is_more, const typename F::Place& next) {
    return F::dot(w, in.codes + c * (int32_t)kChunk, in.scales + 4 * c, is_more, next);
  }
};
struct NormedCodes {
  NormedFloats row;
  float* scales;
  int32_t* magnitudes;
  CANON void expect(const NormedCodes& in, const StepArgs& args) { NormedFloats::expect(in.row, args); }
  template <class Later>
  CANON void prepare(const NormedCodes& in, const StepArgs& args, Later later) {
    const NormOf norm = staged_row(in.row.x, args.columns, args.eps, in.row.staged, in.row.sums, later);
    staged_codes(in.row.norm, args.columns, norm, in.row.ahead, in.row.staged, in.scales, in.magnitudes,
                 in.row.faults, VOX_GROUP_Y, VOX_GROUP_X == 0);
  }
  struct Ahead {};
  CANON void fetch(const NormedCodes&, const StepArgs&, int32_t, Ahead&) {}
  CANON void put(const NormedCodes&, const Ahead&) {}
  template <class H>
  CANON float dot(const NormedCodes& in, StepCodes::Loaded& w, int32_t c, int32_t columns, const StepCodes::Next& next) {
    return StepCodes::dot(w, (const int8_t*)(in.row.staged + c * kStride), in.scales + 4 * c, columns / 32 - 4 * c, next);
  }
  template <class F>
  CANON float whole(const NormedCodes& in, typename F::Loaded& w, int32_t c, bool is_more, const typename F::Place& next) {
    return F::dot(w, (const int8_t*)(in.row.staged + c * kStride), in.scales + 4 * c, is_more, next);
  }
};

// Thread (slice, output) has every `slices`th chunk; a gate's chunks are those of both weights. A turn is a chunk of
// every slice; turns go on from one group of outputs to the next, so that weights never stop coming.
template <class F, class H, int T, class In>
CANON void step_linear_ragged(const StepArgs& args, const typename F::Weights& weights, const In& in, const StepOut& to,
                              float* partials, float* exchange) {
  const int lane = VOX_LOCAL % T, slice = VOX_LOCAL / T;
  const bool is_gate = args.mode >= kSiluGate;
  const int32_t chunks = (args.columns - 1) / (int32_t)kChunk + 1, all = is_gate ? 2 * chunks : chunks;
  // A thread's chunks in turn, beginning somewhere else in each group: groups that go hand in hand would ask the
  // same part of the memory for the same place of their rows. The order of the sums is that of `partials`.
  const int32_t slices = kGroup / T, rounds = (all + slices - 1) / slices;
  StepPlace place = step_place<T>(args, (int32_t)VOX_GROUP_X), at = place;
  int32_t ahead_of = (int32_t)VOX_GROUP_X, mine = ahead_of, round = 0, turn = mine % rounds;
  auto chunk_at = [&](int32_t v) { return is_gate && v >= chunks ? v - chunks : v; };
  auto weight_at = [&](int32_t v) { return is_gate && v >= chunks ? 1 : place.which; };
  // The thread's chunk of the turn that is asked for next, among those of both weights; from `all` on there is none.
  auto next_chunk = [&]() { return place.which < 3 ? slice + turn * slices : all; };
  auto go_on = [&]() {
    turn = turn + 1 == rounds ? 0 : turn + 1;
    if (++round < rounds) return;
    round = 0;
    ahead_of += args.groups;
    place = step_place<T>(args, ahead_of);
  };
  typename F::Loaded loaded[F::depth];
  typename In::Ahead ahead;
  int32_t v[F::depth];
#pragma unroll
  for (int d = 0; d < F::depth; ++d) {
    v[d] = next_chunk();
    if (v[d] < all)
      F::load(loaded[d], weights, weight_at(v[d]), place.group * T + lane, chunk_at(v[d]), args.columns);
    go_on();
  }
  if constexpr (F::later > 0) {
    const int32_t then = slice + turn * slices;
    if (rounds > F::depth && then < all)
      F::expect(weights, weight_at(then), (int64_t)place.group * T + lane, chunk_at(then), args.columns);
  }
  In::expect(in, args);
  inputs_are_there();
  // What is added at the end is asked for now.
  auto residual_of = [&]() {
    const int64_t n = (int64_t)at.group * T + lane;
    if (args.mode != kAddResidual || slice != 0 || n >= args.outputs0) return 0.0f;
    return early(to.residual + VOX_GROUP_Y * args.outputs0 + n);
  };
  float residual = residual_of();
  In::prepare(in, args, [] {});
  In::fetch(in, args, v[0], ahead);
  // As many turns for every thread: there are barriers in them.
  for (int32_t done = 0; at.which < 3;) {
#pragma unroll
    for (int d = 0; d < F::depth; ++d) {
      if (at.which == 3) break;
      In::put(in, ahead);
      const int32_t then = next_chunk();
      typename F::Next next = {};
      if (then < all) next = F::next(weights, weight_at(then), place.group * T + lane, chunk_at(then), args.columns);
      In::fetch(in, args, F::depth == 1 ? then : v[(d + 1) % F::depth], ahead);
      if (v[d] < all)
        partials[v[d] * T + lane] = In::template dot<H>(in, loaded[d], chunk_at(v[d]), args.columns, next);
      else if (then < all)  // the last turn of the slices, where not all have a chunk, may come first
        F::load(loaded[d], weights, weight_at(then), place.group * T + lane, chunk_at(then), args.columns);
      v[d] = then;
      go_on();
      if (++done < rounds) continue;
      done = 0;
      step_end<T>(args, at, to, partials, exchange, residual);
      mine += args.groups;
      at = step_place<T>(args, mine);
      if (at.which == 3) break;
      VOX_BARRIER();  // before partial sums have other ones in their place
      residual = residual_of();
    }
  }
}

// The same where all chunks are whole and every thread has as many, `depth` of them a turn: nothing that depends on a
// place stands between loads and products, so that a thread waits for memory once a turn.
template <class F, int T, class In>
CANON void step_linear_whole(const StepArgs& args, const typename F::Weights& weights, const In& in, const StepOut& to,
                             float* partials, float* exchange) {
  enum { slices = kGroup / T };
  const int lane = VOX_LOCAL % T, slice = VOX_LOCAL / T;
  const int32_t chunks = args.columns / (int32_t)kChunk, all = args.mode >= kSiluGate ? 2 * chunks : chunks;
  const int32_t rounds = all / (slices * F::depth);
  StepPlace place = step_place<T>(args, (int32_t)VOX_GROUP_X), at = place;
  int32_t ahead_of = (int32_t)VOX_GROUP_X, mine = ahead_of, round = 0, turn = mine % rounds;
  auto chunk_of = [&](int32_t turn, int32_t d) { return slice + (turn * F::depth + d) * slices; };
  auto place_of = [&](int32_t v) {
    const bool is_second = v >= chunks;  // of a gate's weights
    return F::at(weights, is_second ? 1 : place.which, (int64_t)place.group * T + lane, is_second ? v - chunks : v, chunks);
  };
  auto go_on = [&]() {
    turn = turn + 1 == rounds ? 0 : turn + 1;
    if (++round < rounds) return;
    round = 0;
    ahead_of += args.groups;
    place = step_place<T>(args, ahead_of);
  };
  typename F::Loaded loaded[F::depth];
  typename In::Ahead ahead;
  int32_t v[F::depth];
#pragma unroll
  for (int d = 0; d < F::depth; ++d) {
    v[d] = chunk_of(turn, d);
    F::load(loaded[d], place_of(v[d]));
  }
  go_on();
  // The `i`th chunk after those that are loaded, of the same outputs or of the next.
  auto expect = [&](int32_t i) {
    const int32_t after = turn + i / F::depth, which = after < rounds ? after : after - rounds;
    if (place.which < 3 && round + i / F::depth < rounds) F::expect(place_of(chunk_of(which, i % F::depth)));
  };
#pragma unroll
  for (int i = 0; i < F::later; ++i) expect(i);
  In::expect(in, args);
  inputs_are_there();
  // What is added at the end is asked for now.
  auto residual_of = [&]() {
    const int64_t n = (int64_t)at.group * T + lane;
    if (args.mode != kAddResidual || slice != 0 || n >= args.outputs0) return 0.0f;
    return early(to.residual + VOX_GROUP_Y * args.outputs0 + n);
  };
  float residual = residual_of();
  In::prepare(in, args, [&] {
#pragma unroll
    for (int i = 0; i < F::late; ++i) expect(F::later + i);
  });
  In::fetch(in, args, v[0], ahead);
  for (int32_t done = 0; at.which < 3;) {
    In::put(in, ahead);
    const bool is_more = place.which < 3;
    int32_t then[F::depth];
    typename F::Place next[F::depth];
#pragma unroll
    for (int d = 0; d < F::depth; ++d) {
      then[d] = chunk_of(turn, d);
      next[d] = place_of(then[d]);
    }
    In::fetch(in, args, then[0], ahead);
#pragma unroll
    for (int d = 0; d < F::depth; ++d) {
      const int32_t c = v[d] >= chunks ? v[d] - chunks : v[d];
      partials[v[d] * T + lane] = In::template whole<F>(in, loaded[d], c, is_more, next[d]);
      v[d] = then[d];
    }
    go_on();
    if (++done < rounds) continue;
    done = 0;
    step_end<T>(args, at, to, partials, exchange, residual);
    mine += args.groups;
    at = step_place<T>(args, mine);
    if (at.which == 3) break;
    VOX_BARRIER();  // before partial sums have other ones in their place
    residual = residual_of();
  }
}

// `Whole`: F, where all chunks are whole and every thread has as many.
template <class F, class Whole, class H, int T, class In>
CANON void step_linear(const StepArgs& args, const typename F::Weights& weights, const In& in, const StepOut& to,
                       float* partials, float* exchange) {
  const int32_t chunks = args.columns / (int32_t)kChunk, all = args.mode >= kSiluGate ? 2 * chunks : chunks;
  if (args.columns % (int32_t)kChunk == 0 && all % (kGroup / T * Whole::depth) == 0)
    step_linear_whole<Whole, T>(args, weights, in, to, partials, exchange);
  else
    step_linear_ragged<F, H, T>(args, weights, in, to, partials, exchange);
}

}  // namespace VOX_ISA
}  // namespace vox

// Buffers of every step kernel. `side` is the norm's weight, or the scales of codes x; d0, d1, d2 are the scales
// of quantised weights. What a kernel does not use may be any buffer.
#define VOX_STEP_KERNEL(name, X)                                                                                        \
  VOX_KERNEL_AT_ONCE(4, name)(VOX_IN(X, x, 0), VOX_IN(float, side, 1), VOX_IN(Piece, w0, 2), VOX_IN(Piece, w1, 3),                 \
                   VOX_IN(Piece, w2, 4), VOX_IN(uint16_t, d0, 5), VOX_IN(uint16_t, d1, 6), VOX_IN(uint16_t, d2, 7),     \
                   VOX_IN(float, residual, 8), VOX_OUT(float, out0, 9), VOX_OUT(float, out1, 10),                       \
                   VOX_OUT(float, out2, 11), VOX_OUT(int8_t, out_codes, 12), VOX_OUT(float, out_scales, 13),            \
                   VOX_OUT(int32_t, faults0, 14), VOX_OUT(int32_t, faults1, 15), VOX_OUT(int32_t, faults2, 16),         \
                   VOX_OUT(int32_t, norm_faults, 17), VOX_ARGS(StepArgs, 18))
#define VOX_STEP_TO                  \
  VOX_SHARED float exchange[kGroup]; \
  const StepOut to = {residual, out0, out1, out2, out_codes, out_scales, faults0, faults1, faults2}
#define VOX_STEP_NORM_SHARED                        \
  VOX_STEP_TO;                                      \
  VOX_SHARED Quad ahead[kNormAheadQuads];           \
  VOX_SHARED Quad staged[kNormStagedQuads];         \
  VOX_SHARED Quad sums[kNormSumQuads];              \
  float* partials = (float*)(Quad*)ahead;           \
  const int64_t first = VOX_GROUP_Y * args.columns; \
  const NormedFloats row = {x + first, side, partials, (float*)(Quad*)staged, (float*)(Quad*)sums, norm_faults}

#define VOX_STEP_HALVES(suffix, H, rows_T, normed_T)                                                             \
  VOX_STEP_KERNEL(vox_step_##suffix##_##rows_T, float) {                                                         \
    VOX_STEP_TO;                                                                                                 \
    VOX_SHARED float partials[kRowPartials];                                                                     \
    VOX_SHARED Quad staged[kRowStaged##rows_T];                                                                  \
    const RowOfFloats<rows_T> row = {x + VOX_GROUP_Y * args.columns, (float*)(Quad*)staged};                     \
    step_linear<StepHalves<H>, WholeHalves<H>, H, rows_T>(args, {w0, w1, w2}, row, to, partials, exchange);                      \
  }                                                                                                              \
  VOX_STEP_KERNEL(vox_step_normed_##suffix##_##normed_T, float) {                                                \
    VOX_STEP_NORM_SHARED;                                                                                        \
    step_linear<StepHalves<H>, WholeHalves<H>, H, normed_T>(args, {w0, w1, w2}, row, to, partials, exchange);                    \
  }
VOX_STEP_HALVES(f16, PackedF16, 8, 16)
VOX_STEP_HALVES(f16, PackedF16, 16, 32)
VOX_STEP_HALVES(bf16, PackedBf16, 8, 16)
VOX_STEP_HALVES(bf16, PackedBf16, 16, 32)
#undef VOX_STEP_HALVES

#define VOX_STEP_CODES(rows_T, normed_T)                                                                         \
  VOX_STEP_KERNEL(vox_step_q8_0_##rows_T, int8_t) {                                                              \
    VOX_STEP_TO;                                                                                                 \
    VOX_SHARED float partials[kRowPartials];                                                                     \
    VOX_SHARED Quad codes[kRowCodeQuads];                                                                        \
    VOX_SHARED Quad scales[kRowScaleQuads];                                                                      \
    const RowOfCodes row = {x + VOX_GROUP_Y * args.columns, side + VOX_GROUP_Y * (args.columns / 32),            \
                            (int8_t*)(Quad*)codes, (float*)(Quad*)scales};                                       \
    step_linear<StepCodes, WholeCodes, StepCodes, rows_T>(args, {w0, w1, w2, d0, d1, d2}, row, to, partials, exchange);      \
  }                                                                                                              \
  VOX_STEP_KERNEL(vox_step_normed_q8_0_##normed_T, float) {                                                      \
    VOX_STEP_NORM_SHARED;                                                                                        \
    VOX_SHARED float scales[kNormBlocks];                                                                        \
    VOX_SHARED int32_t magnitudes[kTwoGroups];                                                                   \
    const NormedCodes coded = {row, scales, magnitudes};                                                         \
    step_linear<StepCodes, WholeCodes, StepCodes, normed_T>(args, {w0, w1, w2, d0, d1, d2}, coded, to, partials, exchange);  \
  }
VOX_STEP_CODES(8, 16)
VOX_STEP_CODES(16, 32)
#undef VOX_STEP_CODES
