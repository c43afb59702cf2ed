// What stands between the products of a few rows: norms, gates, and the int8 codes of what comes out of them, and what
// happens to heads before attention. Codes lie row by row, or in one of the orders in which tensor cores read them.
//
// A launch finds its code anew, and waits for its longest chain: short code, and as little of it in a row as there are
// multiprocessors for.

// A kernel whose groups have so many threads.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define VOX_KERNEL_OF(threads, groups, name) extern "C" __global__ __launch_bounds__(threads, groups) void name
#else
#define VOX_KERNEL_OF(threads, groups, name)          \
  extern "C" { int32_t name##_threads = (threads); }  \
  extern "C" __global__ void name
#endif

namespace vox {
namespace VOX_ISA {

// What `codes_out` says.
enum {
  kNoCodes = 0,
  kCodesOfRows = 1,
  kCodesOfTiles = 2,
  kCodesOfCores = 3,
};

struct alignas(16) Whole {
  int32_t values[4];
};

// Where the code of a row and a column lies in the order of tiles: [rows / 16][blocks][lanes][16 bytes], what each
// lane of a warp multiplies of sixteen rows and a block. Four columns lie together.
CANON int64_t coded_at(int64_t row, int64_t column, int64_t columns) {
  const int64_t inside = column % 32;
  return (row / 16 * columns + column / 32 * 32) * 16 + (row % 8 * 4 + inside / 8) * 16 + inside % 8 / 4 * 8 +
         row % 16 / 8 * 4 + inside % 4;
}
CANON int64_t code_at(bool is_in_tiles, int64_t row, int64_t column, int64_t columns) {
  return is_in_tiles ? coded_at(row, column, columns) : row * columns + column;
}

// The same in the order of core matrices, eight rows of sixteen columns each, which Hopper's tensor cores read from
// shared memory: [rows / 8][columns / 16][8][16], as weights lie (packed.h). Four columns lie together.
CANON int64_t core_at(int64_t row, int64_t column, int64_t columns) {
  return piece_at(row, column / 16, columns / 16) * 16 + column % 16;
}
// Of any order that `codes_out` says.
CANON int64_t code_in(int32_t order, int64_t row, int64_t column, int64_t columns) {
  return order == kCodesOfCores ? core_at(row, column, columns) : code_at(order == kCodesOfTiles, row, column, columns);
}

// Where the scale of a row's block lies; in the order of tiles, and beside core matrices, [rows / 16][chunks][16 rows][4 blocks].
CANON int64_t code_scale_at(bool is_in_tiles, int64_t row, int64_t block, int64_t blocks) {
  if (!is_in_tiles) return row * blocks + block;
  return ((row / 16 * (blocks / 4) + block / 4) * 16 + row % 16) * 4 + block % 4;
}

// `inverse`: of the block, and 0 where it has no codes.
CANON float code_inverse(float d, int32_t amax) { return has_codes(d) ? activation_inverse(amax) : 0.0f; }
CANON uint32_t four_codes(const Quad& y, float inverse) {
  uint32_t word = 0;
  if (inverse > 0.0f)
#pragma unroll
    for (int i = 0; i < 4; ++i) word |= ((uint32_t)activation_code(y.values[i], inverse) & 255u) << 8 * i;
  return word;
}
CANON int32_t four_magnitude(const Quad& y) {
  int32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int32_t magnitude = f_bits(y.values[i]) & 0x7FFFFFFF;
    amax = magnitude > amax ? magnitude : amax;
  }
  return amax;
}
// Of a block, from those of its eight quads.
CANON int32_t block_magnitude(const int32_t* of_quads) {
  const Whole low = *(const Whole*)of_quads, high = *(const Whole*)(of_quads + 4);
  int32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    amax = low.values[i] > amax ? low.values[i] : amax;
    amax = high.values[i] > amax ? high.values[i] : amax;
  }
  return amax;
}

struct BetweenNormArgs {  // group (part of a row, row)
  int32_t columns;
  int32_t part;  // columns that a group makes, in whole turns of its threads; it reads them all
  int32_t floats_out;  // whether anyone reads them
  int32_t codes_out;
  float eps;
};

struct BetweenGateArgs {  // thread (quad, row)
  int32_t width;
  int32_t mode;  // kSiluGate or kGeluGate; kStore: x itself
  int32_t floats_out;
  int32_t codes_out;
};

// A warp has four heads of queries or keys, which share their angles, and a part of the row's values.
struct PlaceArgs {  // group (heads, row)
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;  // in whole quads
  int32_t value_stride;
  int32_t blocks_per_sequence;
  float eps;
};

enum {
  kNormThreads = 256,
  kNormTurn = 4 * kNormThreads,  // columns
  kNormMagnitudeWholes = kNormThreads / 4,
  kMagnitudeWholes = kGroup / 4,
  kPlaceHeads = 4,  // of a warp
  kPlaceGroup = kGroup / 32 * kPlaceHeads,
  kPlaceChunks = kWidestHead / (int)kChunk,
  kPlaceQuads = kPlaceGroup * kPlaceChunks * kStride / 4,
  kPlaceSums = kPlaceGroup * kPlaceChunks,
};

// Two floats of a row of pairs.
struct alignas(8) Two {
  float values[2];
};

// Of all terms of a chunk: the next four quads are on their way while four are added.
CANON float squares_of_chunk(const float* terms) {
  Quad now[4], then[4];
  float p = 0.0f;
#pragma unroll
  for (int i = 0; i < 4; ++i) then[i] = *(const Quad*)(terms + 4 * i);
#pragma unroll 2
  for (int k = 16; k <= (int)kChunk; k += 16) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      now[i] = then[i];
      if (k < (int)kChunk) then[i] = *(const Quad*)(terms + k + 4 * i);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) p = SumOfSquares::step(now[i / 4].values[i % 4], p);
  }
  return p;
}
// `left`: terms of the row from here on.
CANON float chunk_squares(const float* terms, int32_t left) {
  return left >= (int32_t)kChunk ? squares_of_chunk(terms) : squares_of<2>(terms, left);
}

// Where a term of a staged row is.
CANON int staged_at(int32_t k) { return k / (int32_t)kChunk * kStride + k % (int32_t)kChunk; }

}  // namespace VOX_ISA
}  // namespace vox

// The norm of each row, as floats and, where wanted, as codes.
VOX_KERNEL_OF(kNormThreads, 1, vox_step_between_norm)(
    VOX_IN(float, x, 0), VOX_IN(float, weight, 1), VOX_OUT(float, out, 2), VOX_OUT(int8_t, codes, 3),
    VOX_OUT(float, scales, 4), VOX_OUT(int32_t, faults, 5), VOX_ARGS(BetweenNormArgs, 6)) {
  VOX_SHARED Quad staged[kNormStagedQuads];
  VOX_SHARED Whole magnitudes[kNormMagnitudeWholes];
  VOX_SHARED Quad sums[kNormSumQuads];
  const int64_t row = VOX_GROUP_Y, first = row * args.columns;
  const int32_t chunks = (args.columns - 1) / (int32_t)kChunk + 1, begin = (int32_t)VOX_GROUP_X * args.part;
  const int32_t end = begin + args.part < args.columns ? begin + args.part : args.columns;
  float *terms = (float*)(Quad*)staged, *of_chunks = (float*)(Quad*)sums;
  int32_t* of_quads = (int32_t*)(Whole*)magnitudes;
  int32_t k = begin + VOX_LOCAL * 4;
  Quad w = {{0.0f, 0.0f, 0.0f, 0.0f}};
  if (k < end) w = *(const Quad*)(weight + k);
  wait_for_inputs();
  for (int32_t i = VOX_LOCAL * 4; i < args.columns; i += kNormTurn) sent(terms + staged_at(i), x + first + i);
  arrived_all();
  VOX_BARRIER();
  if (VOX_LOCAL < chunks)
    of_chunks[VOX_LOCAL] = chunk_squares(terms + VOX_LOCAL * kStride, args.columns - VOX_LOCAL * (int32_t)kChunk);
  VOX_BARRIER();
  float sum = 0.0f;
  int32_t c = 0;
#pragma unroll 2
  for (; c < chunks / 4 * 4; c += 4) {
    const Quad some = *(const Quad*)(of_chunks + c);
#pragma unroll
    for (int j = 0; j < 4; ++j) sum = chunk_folded(c + j == 0, sum, some.values[j]);
  }
#pragma unroll 1
  for (; c < chunks; ++c) sum = chunk_folded(c == 0, sum, of_chunks[c]);
  const float inverse = norm_inverse(sum, (float)args.columns, args.eps);
  const bool is_sound = is_finite(sum);
  bool are_finite = true;
  // As many turns for every thread: there are barriers in them.
#pragma unroll 1
  for (int32_t turn = begin; turn < end; turn += kNormTurn, k += kNormTurn) {
    const bool is_inside = k < end;
    Quad y = w;
    if (is_inside) {
      if (turn != begin) w = *(const Quad*)(weight + k);
      y = *(const Quad*)(terms + staged_at(k));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        // An infinite sum makes every output zero, and would hide: the row is NaN instead.
        y.values[j] = is_sound ? normed(y.values[j], inverse, w.values[j]) : f_from(0x7FC00000);
        are_finite = are_finite && is_finite(y.values[j]);
      }
      if (args.floats_out) *(Quad*)(out + first + k) = y;
    }
    if (args.codes_out == kNoCodes) continue;
    of_quads[VOX_LOCAL] = four_magnitude(y);
    warp_barrier();  // a block is a warp's
    if (is_inside) {
      const int32_t amax = block_magnitude(of_quads + VOX_LOCAL / 8 * 8);
      const float d = activation_scale(amax);
      if (k % 32 == 0) scales[code_scale_at(args.codes_out != kCodesOfRows, row, k / 32, args.columns / 32)] = d;
      *(uint32_t*)(codes + code_in(args.codes_out, row, k, args.columns)) = four_codes(y, code_inverse(d, amax));
    }
    warp_barrier();
  }
  if (!are_finite) faults[row] = 1;
}

// A gate, or x as it is, as floats and, where wanted, as codes: four elements a thread.
VOX_KERNEL(vox_step_between_gate)(VOX_IN(float, gate, 0), VOX_IN(float, up, 1), VOX_OUT(float, out, 2),
                                  VOX_OUT(int8_t, codes, 3), VOX_OUT(float, scales, 4), VOX_OUT(int32_t, faults, 5),
                                  VOX_ARGS(BetweenGateArgs, 6)) {
  VOX_SHARED Whole magnitudes[kMagnitudeWholes];
  wait_for_inputs();
  const int64_t k = VOX_THREAD_X * 4, at = VOX_THREAD_Y * args.width + k;
  const bool is_inside = k < args.width;
  Quad y = {{0.0f, 0.0f, 0.0f, 0.0f}};
  if (is_inside) {
    y = *(const Quad*)(gate + at);
    if (args.mode != kStore) {
      const Quad u = *(const Quad*)(up + at);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        y.values[i] = args.mode == kSiluGate ? silu_gated(y.values[i], u.values[i]) : gelu_gated(y.values[i], u.values[i]);
        VOX_WATCH(y.values[i], VOX_THREAD_Y);
      }
      if (args.floats_out) *(Quad*)(out + at) = y;
    }
  }
  if (args.codes_out == kNoCodes) return;
  ((int32_t*)(Whole*)magnitudes)[VOX_LOCAL] = four_magnitude(y);
  warp_barrier();  // a block is a warp's
  if (!is_inside) return;
  const int32_t amax = block_magnitude((const int32_t*)(Whole*)magnitudes + VOX_LOCAL / 8 * 8);
  const float d = activation_scale(amax);
  if (k % 32 == 0) scales[code_scale_at(args.codes_out != kCodesOfRows, VOX_THREAD_Y, k / 32, args.width / 32)] = d;
  *(uint32_t*)(codes + code_in(args.codes_out, VOX_THREAD_Y, k, args.width)) = four_codes(y, code_inverse(d, amax));
}

namespace vox {
namespace VOX_ISA {

struct Place {
  const float *q, *k, *v, *q_norm, *k_norm, *table;
  const int32_t *slots, *positions, *sequences, *block_tables;
  float *out, *keys;
  uint32_t* values;
  int32_t *q_norm_faults, *q_rope_faults, *k_norm_faults, *k_rope_faults;
  float *staged, *sums, *inverses, *totals;  // of the warp
};

// `Turns`: quads of a lane and head.
template <int Turns>
CANON void placed(const Place& at, const PlaceArgs& args) {
  enum { kHead = Turns * kStride };
  const int lane = VOX_LOCAL % 32;
  const int64_t row = VOX_GROUP_Y;
  const int32_t width = args.head_dim, pairs = width / 2, chunks = (width - 1) / (int32_t)kChunk + 1;
  const int32_t begin = ((int32_t)VOX_GROUP_X * (kGroup / 32) + VOX_LOCAL / 32) * kPlaceHeads;
  const int32_t left = args.heads + args.kv_heads - begin, heads = left < kPlaceHeads ? left : (int32_t)kPlaceHeads;
  const int32_t position = at.positions[row], sequence = at.sequences[row], slot = position % (int32_t)kBlock;
#pragma unroll
  for (int h = 0; h < kPlaceHeads; ++h) {
    const int32_t n = begin + h;
    const float* x = n < args.heads ? at.q + (row * args.heads + n) * width : at.k + (row * args.kv_heads + n - args.heads) * width;
#pragma unroll
    for (int t = 0; t < Turns; ++t)
      if (h < heads && (lane + t * 32) * 4 < width)
        sent(at.staged + h * kHead + staged_at((lane + t * 32) * 4), x + (lane + t * 32) * 4);
  }
  const int64_t block = at.block_tables[(int64_t)sequence * args.blocks_per_sequence + position / (int32_t)kBlock];
  const float* angles = at.table + ((int64_t)at.slots[position / (int32_t)kBlock] * kBlock + slot) * width;
  const int64_t cache = block * args.kv_heads;
  // Values, as many of all groups' threads as there are quads.
  const int32_t groups = (args.heads + args.kv_heads - 1) / kPlaceGroup + 1, all = args.kv_heads * width;
  for (int32_t i = ((int32_t)VOX_GROUP_X * kGroup + VOX_LOCAL) * 4; i < all; i += groups * kGroup * 4)
    *(Piece*)(at.values + ((cache + i / width) * kBlock + slot) * args.value_stride + i % width) =
        *(const Piece*)(at.v + row * all + i);
  Two cosines[Turns], sines[Turns];
#pragma unroll
  for (int t = 0; t < Turns; ++t) {
    const int32_t i = (lane + t * 32) * 2;
    if (i >= pairs) continue;
    cosines[t] = *(const Two*)(angles + i);
    sines[t] = *(const Two*)(angles + pairs + i);
  }
  arrived_all();
  warp_barrier();
  if (lane < heads * chunks)
    at.sums[lane] = chunk_squares(at.staged + lane / chunks * kHead + lane % chunks * kStride,
                                  width - lane % chunks * (int32_t)kChunk);
  warp_barrier();
  if (lane < heads) {
    float sum = 0.0f;
#pragma unroll
    for (int c = 0; c < Turns; ++c)
      if (c < chunks) sum = chunk_folded(c == 0, sum, at.sums[lane * chunks + c]);
    at.inverses[lane] = norm_inverse(sum, (float)width, args.eps);
    at.totals[lane] = sum;
  }
  warp_barrier();
#pragma unroll 1
  for (int h = 0; h < heads; ++h) {
    const int32_t n = begin + h;
    const bool is_query = n < args.heads;
    const float *weight = is_query ? at.q_norm : at.k_norm, *own = at.staged + h * kHead;
    const float inverse = at.inverses[h];
    const bool is_sound = is_finite(at.totals[h]);
    bool norm_finite = true, turn_finite = true;
#pragma unroll
    for (int t = 0; t < Turns; ++t) {
      const int32_t i = (lane + t * 32) * 2;
      if (i >= pairs) continue;
      const Two low = *(const Two*)(own + staged_at(i)), high = *(const Two*)(own + staged_at(i + pairs));
      const Two low_weight = *(const Two*)(weight + i), high_weight = *(const Two*)(weight + i + pairs);
      Two firsts, seconds;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        // An infinite sum makes every output zero, and would hide: the head is NaN instead.
        const float a = is_sound ? normed(low.values[j], inverse, low_weight.values[j]) : f_from(0x7FC00000);
        const float b = is_sound ? normed(high.values[j], inverse, high_weight.values[j]) : f_from(0x7FC00000);
        norm_finite = norm_finite && is_finite(a) && is_finite(b);
        const Halves<float> y = rotated(a, b, cosines[t].values[j], sines[t].values[j]);
        firsts.values[j] = y.first;
        seconds.values[j] = y.second;
        turn_finite = turn_finite && is_finite(y.first) && is_finite(y.second);
      }
      if (is_query) {
        float* out = at.out + (row * args.heads + n) * width + i;
        *(Two*)out = firsts;
        *(Two*)(out + pairs) = seconds;
        continue;
      }
      float* key = at.keys + ((cache + n - args.heads) * width + i) * kBlock + slot;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        key[j * kBlock] = firsts.values[j];
        key[(j + pairs) * kBlock] = seconds.values[j];
      }
    }
    if (!norm_finite) (is_query ? at.q_norm_faults : at.k_norm_faults)[row] = 1;
    if (!turn_finite) (is_query ? at.q_rope_faults : at.k_rope_faults)[row] = 1;
  }
}

}  // namespace VOX_ISA
}  // namespace vox

// Heads normed, rotated and stored. Buffers: raw q, k, v; the norms' weights; the rotary table and its slots; where rows
// belong; the rotated q, the cache; flags of q's norm, q's rotation, k's norm, k's rotation.
VOX_KERNEL(vox_step_place)(VOX_IN(float, q, 0), VOX_IN(float, k, 1), VOX_IN(float, v, 2), VOX_IN(float, q_norm, 3),
                           VOX_IN(float, k_norm, 4), VOX_IN(float, table, 5), VOX_IN(int32_t, slots, 6),
                           VOX_IN(int32_t, positions, 7), VOX_IN(int32_t, sequences, 8),
                           VOX_IN(int32_t, block_tables, 9), VOX_OUT(float, out, 10), VOX_OUT(float, keys, 11),
                           VOX_OUT(uint32_t, values, 12), VOX_OUT(int32_t, q_norm_faults, 13),
                           VOX_OUT(int32_t, q_rope_faults, 14), VOX_OUT(int32_t, k_norm_faults, 15),
                           VOX_OUT(int32_t, k_rope_faults, 16), VOX_ARGS(PlaceArgs, 17)) {
  VOX_SHARED Quad staged[kPlaceQuads];
  VOX_SHARED float sums[kPlaceSums];
  VOX_SHARED float inverses[kPlaceGroup];
  VOX_SHARED float totals[kPlaceGroup];
  wait_for_inputs();
  const int warp = VOX_LOCAL / 32;
  const Place at = {q, k, v, q_norm, k_norm, table, slots, positions, sequences, block_tables, out, keys, values,
                    q_norm_faults, q_rope_faults, k_norm_faults, k_rope_faults,
                    (float*)(Quad*)staged + warp * kPlaceHeads * kPlaceChunks * kStride,
                    sums + warp * kPlaceHeads * kPlaceChunks, inverses + warp * kPlaceHeads,
                    totals + warp * kPlaceHeads};
  if (args.head_dim <= (int32_t)kChunk)
    placed<1>(at, args);
  else
    placed<2>(at, args);
}
