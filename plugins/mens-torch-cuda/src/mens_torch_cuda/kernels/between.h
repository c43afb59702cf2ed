// What stands between the products of a few rows: norms, gates, and the int8 codes of what comes out of them. Codes
// lie row by row, or in one of the orders in which tensor cores read them.

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

struct BetweenNormArgs {  // group row
  int32_t columns;
  int32_t codes_out;
  float eps;
};

struct BetweenGateArgs {  // thread (quad, row)
  int32_t width;
  int32_t mode;  // kSiluGate or kGeluGate; kStore: x itself
  int32_t codes_out;
};

enum {
  kNormTurns = kNormChunks * (int)kChunk / (4 * kGroup),  // quads of a thread
  kNormMagnitudeWholes = kNormTurns * kGroup / 4,
  kMagnitudeWholes = kGroup / 4,
};

}  // namespace VOX_ISA
}  // namespace vox

// The norm of each row, as floats and, where wanted, as codes.
VOX_KERNEL(vox_step_between_norm)(VOX_IN(float, x, 0), VOX_IN(float, weight, 1), VOX_OUT(float, out, 2),
                                  VOX_OUT(int8_t, codes, 3), VOX_OUT(float, scales, 4), VOX_OUT(int32_t, faults, 5),
                                  VOX_ARGS(BetweenNormArgs, 6)) {
  VOX_SHARED Quad staged[kNormStagedQuads];
  VOX_SHARED Whole magnitudes[kNormMagnitudeWholes];
  VOX_SHARED Quad sums[kNormSumQuads];
  VOX_SHARED float inverses[kNormBlocks];
  const int64_t row = VOX_GROUP_Y, first = row * args.columns;
  const int32_t chunks = (args.columns - 1) / (int32_t)kChunk + 1;
  float *terms = (float*)(Quad*)staged, *of_chunks = (float*)(Quad*)sums;
  Quad own[kNormTurns], w[kNormTurns];
#pragma unroll
  for (int t = 0; t < kNormTurns; ++t) {
    const int32_t k = (VOX_LOCAL + t * kGroup) * 4;
    if (k < args.columns) w[t] = *(const Quad*)(weight + k);
  }
  wait_for_inputs();
#pragma unroll
  for (int t = 0; t < kNormTurns; ++t) {
    const int32_t k = (VOX_LOCAL + t * kGroup) * 4;
    if (k < args.columns) own[t] = *(const Quad*)(x + first + k);
  }
#pragma unroll
  for (int t = 0; t < kNormTurns; ++t) {
    const int32_t k = (VOX_LOCAL + t * kGroup) * 4;
    if (k < args.columns) *(Quad*)(terms + k / (int32_t)kChunk * kStride + k % (int32_t)kChunk) = own[t];
  }
  VOX_BARRIER();
  if (VOX_LOCAL < chunks) {
    const int32_t left = args.columns - VOX_LOCAL * (int32_t)kChunk, count = left < (int32_t)kChunk ? left : (int32_t)kChunk;
    float p = 0.0f;
#pragma unroll 8
    for (int32_t k = 0; k < count; k += 4) {
      const Quad q = *(const Quad*)(terms + VOX_LOCAL * kStride + k);
#pragma unroll
      for (int j = 0; j < 4; ++j) p = SumOfSquares::step(q.values[j], p);
    }
    of_chunks[VOX_LOCAL] = p;
  }
  VOX_BARRIER();
  float sum = 0.0f;
#pragma unroll 8
  for (int32_t c = 0; c < chunks; ++c) sum = chunk_folded(c == 0, sum, of_chunks[c]);
  const float inverse = norm_inverse(sum, (float)args.columns, args.eps);
  const bool is_sound = is_finite(sum);
  bool are_finite = true;
#pragma unroll
  for (int t = 0; t < kNormTurns; ++t) {
    const int32_t k = (VOX_LOCAL + t * kGroup) * 4;
    if (k >= args.columns) continue;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      // An infinite sum makes every output zero, and would hide: the row is NaN instead.
      own[t].values[j] = is_sound ? normed(own[t].values[j], inverse, w[t].values[j]) : f_from(0x7FC00000);
      are_finite = are_finite && is_finite(own[t].values[j]);
    }
    *(Quad*)(out + first + k) = own[t];
    ((int32_t*)(Whole*)magnitudes)[t * kGroup + VOX_LOCAL] = four_magnitude(own[t]);
  }
  if (!are_finite) faults[row] = 1;
  if (args.codes_out == kNoCodes) return;
  VOX_BARRIER();
  // A thread a block: quotients are many instructions, and code that is run once is as slow as it is long.
  const int32_t order = args.codes_out;
  for (int32_t block = VOX_LOCAL; block < args.columns / 32; block += kGroup) {
    const int32_t amax = block_magnitude((const int32_t*)(Whole*)magnitudes + block * 8);
    const float d = activation_scale(amax);
    inverses[block] = code_inverse(d, amax);
    scales[code_scale_at(order != kCodesOfRows, row, block, args.columns / 32)] = d;
  }
  VOX_BARRIER();
  // A turn is whole blocks: as far on in every order.
  int8_t* to = codes + code_in(order, row, VOX_LOCAL * 4, args.columns);
  const int32_t turn = kGroup * 4 * (order == kCodesOfTiles ? 16 : order == kCodesOfCores ? 8 : 1);
#pragma unroll
  for (int t = 0; t < kNormTurns; ++t) {
    const int32_t k = (VOX_LOCAL + t * kGroup) * 4;
    if (k < args.columns) *(uint32_t*)(to + t * turn) = four_codes(own[t], inverses[k / 32]);
  }
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
      *(Quad*)(out + at) = y;
    }
  }
  if (args.codes_out == kNoCodes) return;
  ((int32_t*)(Whole*)magnitudes)[VOX_LOCAL] = four_magnitude(y);
  VOX_BARRIER();
  if (!is_inside) return;
  const int32_t amax = block_magnitude((const int32_t*)(Whole*)magnitudes + VOX_LOCAL / 8 * 8);
  const float d = activation_scale(amax);
  if (k % 32 == 0) scales[code_scale_at(args.codes_out != kCodesOfRows, VOX_THREAD_Y, k / 32, args.width / 32)] = d;
  *(uint32_t*)(codes + code_in(args.codes_out, VOX_THREAD_Y, k, args.width)) = four_codes(y, code_inverse(d, amax));
}
