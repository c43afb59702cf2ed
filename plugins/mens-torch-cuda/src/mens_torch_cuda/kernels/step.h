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

namespace vox {
namespace VOX_ISA {

// Until here, nothing that an earlier kernel writes may be read, and nothing written. Then the next kernel may
// start: earlier, its groups would take the place of this one's.
CANON void wait_for_inputs() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
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

// What threads of one warp wrote before is there for the others.
CANON void warp_barrier() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#else
  VOX_BARRIER();
#endif
}

enum {
  kAhead = 2,                    // rounds of chunks that are asked for before the inputs are there
  kRowStaged8 = kGroup / 8 * kStride,
  kRowStaged16 = kGroup / 16 * kStride,
  kNormChunks = 48,              // of a row that it norms
  kNormStaged = kNormChunks * kStride,
  kNormStagedQuads = kNormStaged / 4,
  kNormCodeQuads = kNormChunks * (int)kChunk / 16,
  kNormBlocks = kNormChunks * 4,
  kRowPartials = 4096,           // at most so many partial sums of a group, [chunks][outputs]
  kNormPartials = 2 * kNormChunks * 32,
  kTwoGroups = 2 * kGroup,
  kStore = 0,
  kAddResidual = 1,
  kSiluGate = 2,
  kGeluGate = 3,
};

struct StepArgs {  // group (outputs of one of three weights, row); a gate: of both weights
  int32_t outputs0, outputs1, outputs2;
  int32_t columns;
  int32_t mode;
  int32_t codes_out;  // whether a gate's outputs are wanted as int8 codes too
  float eps;
};

// 16-bit weights: a chunk of one output is 16 pieces.
template <class H>
struct StepHalves {
  enum { pieces = 16 };
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
  // The eight outputs' chunk is 16 lines of 128 bytes, two for each of their threads.
  CANON void expect(const Weights& in, int which, int64_t n, int32_t chunk, int32_t columns) {
    if (columns - chunk * (int32_t)kChunk < (int32_t)kChunk) return;
    const Piece* w = (which == 0 ? in.w0 : which == 1 ? in.w1 : in.w2) + piece_at(n / 8 * 8, (int64_t)chunk * pieces, columns / 8);
    expected(w + n % 8 * 8);
    expected(w + n % 8 * 8 + 64);
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

struct alignas(8) FourScales {
  uint16_t values[4];
};

// Q8_0: a chunk of one output is four blocks, each two pieces and a scale.
struct StepCodes {
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
    to.scales = *(const FourScales*)d;  // there is room for four, always
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
    const FourScales d = w.scales;
    if (next.left > 0) w.scales = *(const FourScales*)next.d;
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
      if (b < left) p = block_chained(p, f16_widened(d.values[b]), scales[b], dot);
    }
    return p;
  }
};

// The normed row, chunk by chunk in kStride floats. A thread asks for so many quads together. Ends with a barrier.
template <int Together>
CANON void staged_norm(const float* x, const float* weight, int32_t columns, float eps, float* staged, float* sums,
                       int32_t* faults, int64_t row, bool watches) {
  const int32_t chunks = (columns - 1) / (int32_t)kChunk + 1;
  // Several are on their way before the first is put down: each is far away.
  for (int32_t base = VOX_LOCAL * 4; base < columns; base += kGroup * 4 * Together) {
    Quad some[Together];
#pragma unroll
    for (int t = 0; t < Together; ++t)
      if (base + t * kGroup * 4 < columns) some[t] = *(const Quad*)(x + base + t * kGroup * 4);
#pragma unroll
    for (int t = 0; t < Together; ++t) {
      const int32_t i = base + t * kGroup * 4;
      if (i < columns) *(Quad*)(staged + i / (int32_t)kChunk * kStride + i % (int32_t)kChunk) = some[t];
    }
  }
  VOX_BARRIER();
  if (VOX_LOCAL < chunks) {
    const int32_t left = columns - VOX_LOCAL * (int32_t)kChunk, terms = left < (int32_t)kChunk ? left : (int32_t)kChunk;
    float p = 0.0f;
#pragma unroll 8
    for (int32_t k = 0; k < terms; k += 4) {
      const Quad q = *(const Quad*)(staged + VOX_LOCAL * kStride + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) p = SumOfSquares::step(q.values[j], p);
    }
    sums[VOX_LOCAL] = p;
  }
  VOX_BARRIER();
  float sum = 0.0f;
  for (int32_t c = 0; c < chunks; ++c) sum = chunk_folded(c == 0, sum, sums[c]);
  const float inverse = norm_inverse(sum, (float)columns, eps);
  for (int32_t base = VOX_LOCAL * 4; base < columns; base += kGroup * 4 * Together) {
    Quad some[Together];
#pragma unroll
    for (int t = 0; t < Together; ++t)
      if (base + t * kGroup * 4 < columns) some[t] = *(const Quad*)(weight + base + t * kGroup * 4);
#pragma unroll
    for (int t = 0; t < Together; ++t) {
      const int32_t i = base + t * kGroup * 4;
      if (i >= columns) continue;
      Quad* at = (Quad*)(staged + i / (int32_t)kChunk * kStride + i % (int32_t)kChunk);
      Quad q = *at;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // An infinite sum makes every output zero, and would hide: the row is NaN instead.
        q.values[j] = is_finite(sum) ? normed(q.values[j], inverse, some[t].values[j]) : f_from(0x7FC00000);
        if (watches && !is_finite(q.values[j])) faults[row] = 1;
      }
      *at = q;
    }
  }
  VOX_BARRIER();
}

// The int8 codes of a staged row: four threads a block of 32. Ends with a barrier.
CANON void staged_codes(const float* staged, int32_t columns, int8_t* codes, float* scales, int32_t* magnitudes) {
  for (int32_t base = 0, round = 0; base < columns; base += kGroup * 8, ++round) {
    const int32_t i = base + VOX_LOCAL * 8;
    int32_t* of_round = magnitudes + (round & 1) * kGroup;
    Quad low = {{0.0f, 0.0f, 0.0f, 0.0f}}, high = low;
    if (i < columns) {
      const float* at = staged + i / (int32_t)kChunk * kStride + i % (int32_t)kChunk;
      low = *(const Quad*)at;
      high = *(const Quad*)(at + 4);
    }
    int32_t amax = 0;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int32_t magnitude = f_bits(j < 4 ? low.values[j & 3] : high.values[j & 3]) & 0x7FFFFFFF;
      amax = magnitude > amax ? magnitude : amax;
    }
    of_round[VOX_LOCAL] = amax;
    VOX_BARRIER();
    if (i < columns) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int32_t magnitude = of_round[VOX_LOCAL / 4 * 4 + j];
        amax = magnitude > amax ? magnitude : amax;
      }
      const float d = activation_scale(amax), inverse = has_codes(d) ? activation_inverse(amax) : 0.0f;
      if (i % 32 == 0) scales[i / 32] = d;
      uint32_t words[2] = {0, 0};
      if (has_codes(d)) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float value = j < 4 ? low.values[j & 3] : high.values[j & 3];
          words[j / 4] |= ((uint32_t)activation_code(value, inverse) & 255u) << 8 * (j & 3);
        }
      }
      ((uint32_t*)(codes + i))[0] = words[0];
      ((uint32_t*)(codes + i))[1] = words[1];
    }
  }
  VOX_BARRIER();
}

// Which of the weights side by side a group works for, and which of its outputs come first.
struct StepPlace {
  int which;
  int64_t group;
};
template <int T>
CANON StepPlace step_place(const StepArgs& args) {
  StepPlace at = {0, VOX_GROUP_X};
  if (args.mode >= kSiluGate) return at;
  const int64_t groups0 = (args.outputs0 + T - 1) / T, groups1 = (args.outputs1 + T - 1) / T;
  if (at.group >= groups0) {
    at = {1, at.group - groups0};
    if (at.group >= groups1) at = {2, at.group - groups1};
  }
  return at;
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
CANON void step_end(const StepArgs& args, const StepPlace& at, const StepOut& to, const float* partials, float* exchange) {
  const int lane = VOX_LOCAL % T, slice = VOX_LOCAL / T;
  const int32_t chunks = (args.columns - 1) / (int32_t)kChunk + 1;
  const int64_t n = at.group * T + lane, row = VOX_GROUP_Y;
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
      total = f_add(to.residual[row * outputs + n], total);
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
  CANON void prepare(const RowOfFloats&, const StepArgs&) {}
  // A warp reads its chunks side by side, one quad a thread and chunk; `v` is the thread's own chunk.
  CANON void fetch(const RowOfFloats& in, const StepArgs& args, int32_t v, Ahead& to) {
    const int32_t first = v - VOX_LOCAL % 32 / T;
#pragma unroll
    for (int i = 0; i < 32 / T; ++i) {
      const int32_t k = (first + i) * (int32_t)kChunk + VOX_LOCAL % 32 * 4;
      if (k < args.columns) to.quads[i] = *(const Quad*)(in.x + k);
    }
  }
  CANON void put(const RowOfFloats& in, const Ahead& from) {
    warp_barrier();
#pragma unroll
    for (int i = 0; i < 32 / T; ++i)
      *(Quad*)(in.staged + (VOX_LOCAL / 32 * (32 / T) + i) * kStride + VOX_LOCAL % 32 * 4) = from.quads[i];
    warp_barrier();
  }
  template <class H>
  CANON float dot(const RowOfFloats& in, typename StepHalves<H>::Loaded& w, int32_t c, int32_t columns,
                  const typename StepHalves<H>::Next& next) {
    return StepHalves<H>::dot(w, in.staged + VOX_LOCAL / T * kStride, columns - c * (int32_t)kChunk, next);
  }
};
struct NormedFloats {
  const float *x, *norm;
  float *staged, *sums;
  int32_t* faults;
  CANON void expect(const NormedFloats& in, const StepArgs& args) {
    for (int32_t i = VOX_LOCAL * 32; i < args.columns; i += kGroup * 32) expected(in.norm + i);
  }
  CANON void prepare(const NormedFloats& in, const StepArgs& args) {
    normed<1>(in, args);
  }
  template <int Together>
  CANON void normed(const NormedFloats& in, const StepArgs& args) {
    staged_norm<Together>(in.x, in.norm, args.columns, args.eps, in.staged, in.sums, in.faults, VOX_GROUP_Y,
                          VOX_GROUP_X == 0);
  }
  struct Ahead {};
  CANON void fetch(const NormedFloats&, const StepArgs&, int32_t, Ahead&) {}
  CANON void put(const NormedFloats&, const Ahead&) {}
  template <class H>
  CANON float dot(const NormedFloats& in, typename StepHalves<H>::Loaded& w, int32_t c, int32_t columns,
                  const typename StepHalves<H>::Next& next) {
    return StepHalves<H>::dot(w, in.staged + c * kStride, columns - c * (int32_t)kChunk, next);
  }
};
struct RowOfCodes {
  const int8_t* codes;
  const float* scales;
  CANON void expect(const RowOfCodes&, const StepArgs&) {}
  CANON void prepare(const RowOfCodes&, const StepArgs&) {}
  struct Ahead {};
  CANON void fetch(const RowOfCodes&, const StepArgs&, int32_t, Ahead&) {}
  CANON void put(const RowOfCodes&, const Ahead&) {}
  template <class H>
  CANON float dot(const RowOfCodes& in, StepCodes::Loaded& w, int32_t c, int32_t columns, const StepCodes::Next& next) {
    return StepCodes::dot(w, in.codes + (int64_t)c * kChunk, in.scales + 4 * c, columns / 32 - 4 * c, next);
  }
};
struct NormedCodes {
  NormedFloats row;
  int8_t* codes;
  float* scales;
  int32_t* magnitudes;
  CANON void expect(const NormedCodes& in, const StepArgs& args) { NormedFloats::expect(in.row, args); }
  CANON void prepare(const NormedCodes& in, const StepArgs& args) {
    NormedFloats::normed<4>(in.row, args);
    staged_codes(in.row.staged, args.columns, in.codes, in.scales, in.magnitudes);
  }
  struct Ahead {};
  CANON void fetch(const NormedCodes&, const StepArgs&, int32_t, Ahead&) {}
  CANON void put(const NormedCodes&, const Ahead&) {}
  template <class H>
  CANON float dot(const NormedCodes& in, StepCodes::Loaded& w, int32_t c, int32_t columns, const StepCodes::Next& next) {
    return StepCodes::dot(w, in.codes + c * (int32_t)kChunk, in.scales + 4 * c, columns / 32 - 4 * c, next);
  }
};

// Thread (slice, output) has every `slices`th chunk; a gate's chunks are those of both weights.
template <class F, class H, int T, class In>
CANON void step_linear(const StepArgs& args, const typename F::Weights& weights, const In& in, const StepOut& to,
                       float* partials, float* exchange) {
  const int lane = VOX_LOCAL % T;
  const StepPlace at = step_place<T>(args);
  const int64_t n = at.group * T + lane;
  const bool is_gate = args.mode >= kSiluGate;
  const int32_t chunks = (args.columns - 1) / (int32_t)kChunk + 1, all = is_gate ? 2 * chunks : chunks;
  typename F::Loaded loaded;
  typename In::Ahead ahead;
  // A thread's chunks in turn, beginning somewhere else in each group: groups that go hand in hand would ask the
  // same part of the memory for the same place of their rows. The order of the sums is that of `partials`.
  const int32_t slices = kGroup / T, rounds = (all + slices - 1) / slices, begin = (int32_t)(VOX_GROUP_X % rounds);
  auto chunk_of = [&](int32_t round) { return VOX_LOCAL / T + (round + begin) % rounds * slices; };
  auto of_weights = [&](int32_t v) { return is_gate ? v / chunks : at.which; };
  int32_t v = chunk_of(0);
  if (v < all) F::load(loaded, weights, of_weights(v), n, v % chunks, args.columns);
  for (int32_t i = 1; i <= kAhead && i < rounds; ++i) {
    const int32_t then = chunk_of(i);
    if (then < all) F::expect(weights, of_weights(then), n, then % chunks, args.columns);
  }
  In::expect(in, args);
  wait_for_inputs();
  In::prepare(in, args);
  In::fetch(in, args, v, ahead);
  // As many rounds for every thread: there are barriers in them.
  for (int32_t round = 0; round < rounds; ++round) {
    In::put(in, ahead);
    const int32_t then = round + 1 < rounds ? chunk_of(round + 1) : all;
    typename F::Next next = {};
    if (then < all) next = F::next(weights, of_weights(then), n, then % chunks, args.columns);
    if (round + 1 < rounds) In::fetch(in, args, then, ahead);
    if (v < all)
      partials[v * T + lane] = In::template dot<H>(in, loaded, v % chunks, args.columns, next);
    else if (then < all)  // the last turn of the slices, where not all have a chunk, may come first
      F::load(loaded, weights, of_weights(then), n, then % chunks, args.columns);
    v = then;
  }
  step_end<T>(args, at, to, partials, exchange);
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
#define VOX_STEP_SHARED(count)       \
  VOX_SHARED float partials[count];  \
  VOX_SHARED float exchange[kGroup]; \
  const StepOut to = {residual, out0, out1, out2, out_codes, out_scales, faults0, faults1, faults2}
#define VOX_STEP_NORM_SHARED                 \
  VOX_STEP_SHARED(kNormPartials);            \
  VOX_SHARED float staged[kNormStaged];      \
  VOX_SHARED float sums[kNormChunks];        \
  const int64_t first = VOX_GROUP_Y * args.columns; \
  const NormedFloats row = {x + first, side, staged, sums, norm_faults}

#define VOX_STEP_HALVES(suffix, H, rows_T, normed_T)                                                             \
  VOX_STEP_KERNEL(vox_step_##suffix##_##rows_T, float) {                                                         \
    VOX_STEP_SHARED(kRowPartials);                                                                               \
    VOX_SHARED float staged[kRowStaged##rows_T];                                                                 \
    const RowOfFloats<rows_T> row = {x + VOX_GROUP_Y * args.columns, staged};                                    \
    step_linear<StepHalves<H>, H, rows_T>(args, {w0, w1, w2}, row, to, partials, exchange);                      \
  }                                                                                                              \
  VOX_STEP_KERNEL(vox_step_normed_##suffix##_##normed_T, float) {                                                \
    VOX_STEP_NORM_SHARED;                                                                                        \
    step_linear<StepHalves<H>, H, normed_T>(args, {w0, w1, w2}, row, to, partials, exchange);                    \
  }
VOX_STEP_HALVES(f16, PackedF16, 8, 16)
VOX_STEP_HALVES(f16, PackedF16, 16, 32)
VOX_STEP_HALVES(bf16, PackedBf16, 8, 16)
VOX_STEP_HALVES(bf16, PackedBf16, 16, 32)
#undef VOX_STEP_HALVES

#define VOX_STEP_CODES(rows_T, normed_T)                                                                         \
  VOX_STEP_KERNEL(vox_step_q8_0_##rows_T, int8_t) {                                                              \
    VOX_STEP_SHARED(kRowPartials);                                                                               \
    const RowOfCodes row = {x + VOX_GROUP_Y * args.columns, side + VOX_GROUP_Y * (args.columns / 32)};           \
    step_linear<StepCodes, StepCodes, rows_T>(args, {w0, w1, w2, d0, d1, d2}, row, to, partials, exchange);      \
  }                                                                                                              \
  VOX_STEP_KERNEL(vox_step_normed_q8_0_##normed_T, float) {                                                      \
    VOX_STEP_NORM_SHARED;                                                                                        \
    VOX_SHARED Quad codes[kNormCodeQuads];                                                                       \
    VOX_SHARED float scales[kNormBlocks];                                                                        \
    VOX_SHARED int32_t magnitudes[kTwoGroups];                                                                   \
    const NormedCodes coded = {row, (int8_t*)(Quad*)codes, scales, magnitudes};                                  \
    step_linear<StepCodes, StepCodes, normed_T>(args, {w0, w1, w2, d0, d1, d2}, coded, to, partials, exchange);  \
  }
VOX_STEP_CODES(8, 16)
VOX_STEP_CODES(16, 32)
#undef VOX_STEP_CODES
