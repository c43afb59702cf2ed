// Linear layers of one row, with what stands before and behind them: a norm (and int8 codes) of the input in
// front, a residual or a gate at the end. Every value is made by the operators' own sequence; what is saved is
// launches and memory. Each kernel starts while the one before it ends (`wait_for_inputs`), and has its first
// weights on their way by then: weights are no one's output.

namespace vox {
namespace VOX_ISA {

enum {
  kRowStaged8 = kGroup / 8 * kStride / 4,  // quads
  kRowStaged16 = kGroup / 16 * kStride / 4,
  kRowChunks = 224,
  kRowPartials = kRowChunks * 16,
  kRowCodeQuads = kRowChunks * (int)kChunk / 16,
  kRowScaleQuads = kRowChunks,
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
