// Linear layers over weights packed for GPUs that read 16 bytes a thread: the bits of grid/float_weights.h and
// grid/quantised.h. Compiled behind the grid kernels, in the same text.
//
// A piece is 16 bytes of one output's weights: 8 halves or 16 codes. Pieces of eight outputs lie side by side,
// [outputs / 8][pieces of a row][8], so that a chunk of eight outputs is 1 or 2 KiB in a row, which is what the
// memory is fast at. Scales of quantised weights: [outputs / 8][chunks][8][4 blocks of the chunk]. A
// group makes 16 outputs of kRows rows: thread (slice, output) has every eighth chunk, and the chunks are folded
// in their order by one thread per output and row.

namespace vox {
namespace VOX_ISA {

struct alignas(16) Piece {
  uint32_t words[4];
};
struct alignas(16) Quad {
  float values[4];
};

enum {
  kOutputs = 16,                // of a group
  kSlices = kGroup / kOutputs,  // chunks of a round
  kMostRows = 8,
  kPartials = kSlices * kMostRows * kOutputs,
  kStride = (int)kChunk + 4,    // of a staged chunk: two slices of a warp read different banks
  kStaged1 = kSlices * kStride,
  kStaged8 = 8 * kStaged1,
  kWidestHead = 256,            // channels of vox_attention_staged
  kWidest = 64,                           // chunks of a row that vox_norm_staged holds
  kStaged = kWidest * ((int)kChunk + 1),  // one float more per chunk: threads of different chunks read different banks
};

// Bytes from one chunk of eight outputs to the next: of codes in blocks of 32, and of their scales.
enum { kCodesApart = 8 * (int)kChunk, kScalesApart = 8 * (int)kChunk / 32 * 2 };

// Where piece `p` of output `n` lies.
CANON int64_t piece_at(int64_t n, int64_t p, int64_t pieces) { return (n / 8 * pieces + p) * 8 + n % 8; }
// Where the scale of block `b` of output `n` lies.
CANON int64_t scale_at(int64_t n, int64_t b, int64_t blocks) {
  return (n / 8 * ((blocks + 3) / 4) + b / 4) * 32 + n % 8 * 4 + b % 4;
}

struct PackArgs {  // thread (output, piece)
  int32_t outputs;
  int32_t padded;
  int32_t columns;
};

struct PackedArgs {  // group (outputs, rows)
  int32_t outputs;
  int32_t columns;
  int32_t rows;
};

struct PackedEmbedArgs {  // thread (column, row)
  int32_t columns;
  float scale;
};

CANON int32_t dot4(uint32_t a, uint32_t b, int32_t sum) {
#if defined(__CUDA_ARCH__)
  return __dp4a((int)a, (int)b, sum);
#else
  for (int i = 0; i < 4; ++i) sum += (int32_t)(int8_t)(a >> 8 * i) * (int32_t)(int8_t)(b >> 8 * i);
  return sum;
#endif
}

// A float16 is widened exactly, whatever is flushed: one instruction.
CANON float f16_widened(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)bits));
  return y;
#else
  return f16_to_f32(bits);
#endif
}

struct PackedF16 {
  CANON float low(uint32_t word) { return f16_widened(word & 0xFFFFu); }
  CANON float high(uint32_t word) { return f16_widened(word >> 16); }
};
struct PackedBf16 {
  CANON float low(uint32_t word) { return f_from((int32_t)(word << 16)); }
  CANON float high(uint32_t word) { return f_from((int32_t)(word & 0xFFFF0000u)); }
};

template <class F>
struct HalvesOf {
  enum { staged = kSlices * kStride, columns = (int)kChunk };  // floats of a row and round; columns of a chunk
  const float* x;
  const Piece* weight;

  // The row's terms of this round, for everyone.
  CANON void stage(const HalvesOf& in, const PackedArgs& args, int64_t row, int32_t first_chunk, float* to) {
    for (int32_t i = VOX_LOCAL * 4; i < kSlices * (int32_t)kChunk; i += kGroup * 4) {
      const int32_t k = first_chunk * (int32_t)kChunk + i;
      if (k < args.columns)
        *(Quad*)(to + i / (int32_t)kChunk * kStride + i % (int32_t)kChunk) = *(const Quad*)(in.x + row * args.columns + k);
    }
  }

  template <class X>
  CANON float eight(const Piece& piece, const X& x, float p) {
    const Quad a = *(const Quad*)(x), b = *(const Quad*)(x + 4);
    p = f_fma(a.values[0], F::low(piece.words[0]), p);
    p = f_fma(a.values[1], F::high(piece.words[0]), p);
    p = f_fma(a.values[2], F::low(piece.words[1]), p);
    p = f_fma(a.values[3], F::high(piece.words[1]), p);
    p = f_fma(b.values[0], F::low(piece.words[2]), p);
    p = f_fma(b.values[1], F::high(piece.words[2]), p);
    p = f_fma(b.values[2], F::low(piece.words[3]), p);
    return f_fma(b.values[3], F::high(piece.words[3]), p);
  }

  // One chunk of every row of the group: p[r] from +0, terms ascending. All its pieces are on their way before
  // the first is used.
  template <int Rows>
  CANON void chunk(const HalvesOf& in, const PackedArgs& args, int64_t n, int32_t chunk, const float* x, float* p) {
    enum { pieces = (int)kChunk / 8 };
    const int32_t left = args.columns - chunk * (int32_t)kChunk;
    const Piece* w = in.weight + piece_at(n, (int64_t)chunk * pieces, args.columns / 8);
    if (left < (int32_t)kChunk) {
      for (int32_t i = 0; i < left / 8; ++i)
        for (int r = 0; r < Rows; ++r) p[r] = eight(w[(int64_t)i * 8], x + r * staged + 8 * i, p[r]);
      return;
    }
    Piece all[pieces];
#pragma unroll
    for (int i = 0; i < pieces; ++i) all[i] = w[(int64_t)i * 8];
#pragma unroll
    for (int i = 0; i < pieces; ++i) {
#pragma unroll
      for (int r = 0; r < Rows; ++r) p[r] = eight(all[i], x + r * staged + 8 * i, p[r]);
    }
  }
};

struct CodesOf {
  const int8_t* codes;
  const float* scales;
  const Piece* weight;
  const uint16_t* weight_scales;
  enum { staged = 0, columns = (int)kChunk };
  int64_t first_row;

  CANON void stage(const CodesOf&, const PackedArgs&, int64_t, int32_t, float*) {}

  template <int Rows>
  CANON void chunk(const CodesOf& in, const PackedArgs& args, int64_t n, int32_t chunk, const float*, float* p) {
    const int64_t first_row = in.first_row;
    const int32_t blocks = args.columns / 32, begin = chunk * 4, end = begin + 4 < blocks ? begin + 4 : blocks;
#pragma unroll 4
    for (int32_t b = begin; b < end; ++b) {
      const Piece low = in.weight[piece_at(n, 2 * b, 2 * blocks)], high = in.weight[piece_at(n, 2 * b + 1, 2 * blocks)];
      const float d = f16_widened(in.weight_scales[scale_at(n, b, blocks)]);
#pragma unroll
      for (int r = 0; r < Rows; ++r) {
        const int64_t row = first_row + r < args.rows ? first_row + r : args.rows - 1;
        const Piece* a = (const Piece*)(in.codes + row * args.columns + 32 * b);
        const Piece x_low = a[0], x_high = a[1];
        int32_t dot = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) dot = dot4(low.words[i], x_low.words[i], dot);
#pragma unroll
        for (int i = 0; i < 4; ++i) dot = dot4(high.words[i], x_high.words[i], dot);
        p[r] = block_chained(p[r], d, in.scales[row * blocks + b], dot);
      }
    }
  }
};

template <int Rows, class In>
CANON void packed_linear(const In& in, float* out, int32_t* faults, const PackedArgs& args, float* staged,
                         float* partials) {
  const int lane = VOX_LOCAL % kOutputs, slice = VOX_LOCAL / kOutputs;
  const int64_t n = VOX_GROUP_X * kOutputs + lane, first_row = VOX_GROUP_Y * Rows;
  const int32_t chunks = (args.columns - 1) / In::columns + 1;
  float total = 0.0f;
  for (int32_t first = 0; first < chunks; first += kSlices) {
    float p[Rows];
#pragma unroll
    for (int r = 0; r < Rows; ++r) p[r] = 0.0f;
    for (int r = 0; r < Rows; ++r)
      In::stage(in, args, first_row + r < args.rows ? first_row + r : args.rows - 1, first, staged + r * In::staged);
    VOX_BARRIER();  // the rows are there, and the last round's chunks are folded
    if (first + slice < chunks) In::template chunk<Rows>(in, args, n, first + slice, staged + slice * kStride, p);
#pragma unroll
    for (int r = 0; r < Rows; ++r) partials[(slice * Rows + r) * kOutputs + lane] = p[r];
    VOX_BARRIER();
    const int32_t count = chunks - first < kSlices ? chunks - first : kSlices;
    if (slice < Rows)
      for (int32_t i = 0; i < count; ++i)
        total = chunk_folded(first == 0 && i == 0, total, partials[(i * Rows + slice) * kOutputs + lane]);
  }
  const int64_t row = first_row + slice;
  if (slice < Rows && n < args.outputs && row < args.rows) {
    out[row * args.outputs + n] = total;
    VOX_WATCH(total, row);
  }
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_PACKED_HALVES(suffix, F, rows)                                                                       \
  VOX_KERNEL(vox_packed_##suffix##_##rows)(VOX_IN(float, x, 0), VOX_IN(Piece, weight, 1), VOX_OUT(float, out, 2), \
                                           VOX_OUT(int32_t, faults, 3), VOX_ARGS(PackedArgs, 4)) {               \
    VOX_SHARED float partials[kPartials];                                                                        \
    VOX_SHARED float staged[kStaged##rows];                                                                      \
    packed_linear<rows>(HalvesOf<F>{x, weight}, out, faults, args, staged, partials);                            \
  }
VOX_PACKED_HALVES(f16, PackedF16, 1)
VOX_PACKED_HALVES(f16, PackedF16, 8)
VOX_PACKED_HALVES(bf16, PackedBf16, 1)
VOX_PACKED_HALVES(bf16, PackedBf16, 8)
#undef VOX_PACKED_HALVES

#define VOX_PACKED_CODES(rows)                                                                                   \
  VOX_KERNEL(vox_packed_q8_0_##rows)(VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1), VOX_IN(Piece, weight, 2), \
                                     VOX_IN(uint16_t, weight_scales, 3), VOX_OUT(float, out, 4),                 \
                                     VOX_OUT(int32_t, faults, 5), VOX_ARGS(PackedArgs, 6)) {                     \
    VOX_SHARED float partials[kPartials];                                                                        \
    const CodesOf in{codes, scales, weight, weight_scales, VOX_GROUP_Y * rows};                                  \
    packed_linear<rows>(in, out, faults, args, partials, partials);                                              \
  }
VOX_PACKED_CODES(1)
VOX_PACKED_CODES(8)
#undef VOX_PACKED_CODES

// --- packing, and rows of what is packed ------------------------------------------------------------------------

VOX_KERNEL(vox_pack_halves)(VOX_IN(Piece, source, 0), VOX_OUT(Piece, out, 1), VOX_ARGS(PackArgs, 2)) {
  const int64_t n = VOX_THREAD_X, k = VOX_THREAD_Y;
  if (n >= args.padded) return;
  const Piece none = {{0, 0, 0, 0}};
  out[piece_at(n, k, args.columns / 8)] = n < args.outputs ? source[n * (args.columns / 8) + k] : none;
}

// One block of one output: two pieces and a scale. A code of five or four bits takes the place of one of eight: the
// sums of a block are the same integers.
namespace vox {
namespace VOX_ISA {
template <class F>
CANON void pack_block(BlockBytes source, Piece* out, uint16_t* scales, const PackArgs& args, int64_t n, int64_t b) {
  if (n >= args.padded) return;
  BlockBytes block = source + (n * (args.columns / 32) + b) * F::bytes;
  for (int half = 0; half < 2; ++half) {
    Piece piece = {{0, 0, 0, 0}};
    if (n < args.outputs)
      for (int i = 0; i < 16; ++i) piece.words[i / 4] |= ((uint32_t)F::code(block, half * 16 + i) & 255u) << 8 * (i % 4);
    out[piece_at(n, 2 * b + half, args.columns / 16)] = piece;
  }
  scales[scale_at(n, b, args.columns / 32)] = n < args.outputs ? (uint16_t)two_bytes(block) : (uint16_t)0;
}
}  // namespace VOX_ISA
}  // namespace vox

#define VOX_PACK_BLOCKS(suffix, F)                                                                         \
  VOX_KERNEL(vox_pack_##suffix)(VOX_IN(uint8_t, source, 0), VOX_OUT(Piece, out, 1), VOX_OUT(uint16_t, scales, 2), \
                                VOX_ARGS(PackArgs, 3)) {                                                   \
    pack_block<F>(source, out, scales, args, VOX_THREAD_X, VOX_THREAD_Y);                                   \
  }
VOX_PACK_BLOCKS(q8_0, FileQ8_0)
VOX_PACK_BLOCKS(q5_0, FileQ5_0)
VOX_PACK_BLOCKS(q4_0, FileQ4_0)
#undef VOX_PACK_BLOCKS

#define VOX_PACKED_EMBED(suffix, F)                                                                                  \
  VOX_KERNEL(vox_embed_packed_##suffix)(VOX_IN(uint16_t, table, 0), VOX_IN(int32_t, ids, 1), VOX_OUT(float, out, 2), \
                                        VOX_OUT(int32_t, faults, 3), VOX_ARGS(PackedEmbedArgs, 4)) {                 \
    const int64_t k = VOX_THREAD_X;                                                                                  \
    if (k >= args.columns) return;                                                                                   \
    const uint32_t bits = table[piece_at(ids[VOX_THREAD_Y], k / 8, args.columns / 8) * 8 + k % 8];                              \
    const float y = f_mul(F::low(bits), args.scale);                                                                 \
    out[VOX_THREAD_Y * args.columns + k] = y;                                                                        \
    VOX_WATCH(y, VOX_THREAD_Y);                                                                                      \
  }
VOX_PACKED_EMBED(f16, PackedF16)
VOX_PACKED_EMBED(bf16, PackedBf16)
#undef VOX_PACKED_EMBED

VOX_KERNEL(vox_embed_packed_q8_0)(VOX_IN(int8_t, table, 0), VOX_IN(uint16_t, scales, 1), VOX_IN(int32_t, ids, 2),
                                  VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4), VOX_ARGS(PackedEmbedArgs, 5)) {
  const int64_t k = VOX_THREAD_X, n = ids[VOX_THREAD_Y];
  if (k >= args.columns) return;
  const float d = f16_to_f32(scales[scale_at(n, k / 32, args.columns / 32)]);
  const float y = f_mul(weight_of(d, table[piece_at(n, k / 16, args.columns / 16) * 16 + k % 16]), args.scale);
  out[VOX_THREAD_Y * args.columns + k] = y;
  VOX_WATCH(y, VOX_THREAD_Y);
}

// --- activations to int8 ----------------------------------------------------------------------------------------

// vox_quantise_32 with a thread per element: a group has four blocks of a row.
VOX_KERNEL(vox_quantise_32_wide)(VOX_IN(float, x, 0), VOX_OUT(int8_t, codes, 1), VOX_OUT(float, scales, 2),
                                 VOX_ARGS(QuantiseArgs, 3)) {
  VOX_SHARED int32_t magnitudes[kGroup];
  const int64_t k = VOX_THREAD_X, at = VOX_THREAD_Y * args.columns + k;
  const bool is_inside = k < args.columns;
  const float value = is_inside ? x[at] : 0.0f;
  magnitudes[VOX_LOCAL] = f_bits(value) & 0x7FFFFFFF;
  VOX_BARRIER();
  int32_t amax = 0;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const int32_t magnitude = magnitudes[VOX_LOCAL / 32 * 32 + i];
    amax = magnitude > amax ? magnitude : amax;
  }
  if (!is_inside) return;
  const float d = activation_scale(amax);
  if (k % 32 == 0) scales[VOX_THREAD_Y * (args.columns / 32) + k / 32] = d;
  codes[at] = has_codes(d) ? (int8_t)activation_code(value, activation_inverse(amax)) : (int8_t)0;
}

// --- attention --------------------------------------------------------------------------------------------------

// vox_attention with the query in shared memory, the maximum found by several threads, and one loop for the sum
// of weights and the values. For heads of at most kWidestHead channels.
VOX_KERNEL(vox_attention_staged)(VOX_IN(float, q, 0), VOX_IN(float, keys, 1), VOX_IN(float, values, 2),
                                 VOX_IN(int32_t, positions, 3), VOX_IN(int32_t, sequences, 4),
                                 VOX_IN(int32_t, block_tables, 5), VOX_OUT(float, out, 6), VOX_OUT(int32_t, faults, 7),
                                 VOX_ARGS(AttentionArgs, 8)) {
  VOX_SHARED float query[kWidestHead];
  VOX_SHARED float weights[kGroup];
  VOX_SHARED float highest[kOutputs];
  const int64_t start_of_query = (VOX_GROUP_Y * args.heads + VOX_GROUP_X) * args.head_dim;
  const int64_t kv_head = VOX_GROUP_X / (args.heads / args.kv_heads);
  const int64_t table = (int64_t)sequences[VOX_GROUP_Y] * args.blocks_per_sequence;
  const int32_t last = positions[VOX_GROUP_Y];
  const int32_t low = args.window > 0 && last >= args.window ? last - args.window + 1 : 0;
  const int32_t first_block = low / (int32_t)kBlock;
  for (int32_t c = VOX_LOCAL; c < args.head_dim; c += kGroup) query[c] = q[start_of_query + c];
  float m = 0.0f, l = 0.0f, o[kWidestHead / kGroup];
  for (int32_t b = first_block; b <= last / (int32_t)kBlock; ++b) {
    const int32_t start = b * (int32_t)kBlock;
    const int32_t begin = low > start ? low - start : 0;
    const int32_t end = last - start < (int32_t)kBlock ? last - start + 1 : (int32_t)kBlock;
    const int64_t cache = (int64_t)block_tables[table + b] * args.kv_heads + kv_head;
    const bool is_inside = VOX_LOCAL >= begin && VOX_LOCAL < end;
    VOX_BARRIER();  // the query is there, and the last block's weights are read
    float s = f_from((int32_t)0xFF800000u);
    if (is_inside) {
      const float* key = keys + cache * args.head_dim * kBlock + VOX_LOCAL;
      float y = 0.0f;
      for (int32_t first = 0; first < args.head_dim; first += (int32_t)kChunk) {
        const int32_t stop = first + (int32_t)kChunk < args.head_dim ? first + (int32_t)kChunk : args.head_dim;
        float p = 0.0f;
#pragma unroll 32
        for (int32_t c = first; c < stop; ++c) p = f_fma(query[c], key[(int64_t)c * kBlock], p);
        y = chunk_folded(first == 0, y, p);
      }
      s = f_mul(y, args.scale);
      if (args.softcap != 0.0f) s = f_softcap(s, args.softcap);
    }
    weights[VOX_LOCAL] = s;
    VOX_BARRIER();
    if (VOX_LOCAL < kOutputs) {
      float most = weights[VOX_LOCAL];
#pragma unroll
      for (int j = 1; j < kSlices; ++j) most = f_max(most, weights[VOX_LOCAL + j * kOutputs]);
      highest[VOX_LOCAL] = most;
    }
    VOX_BARRIER();
    float m_block = highest[0];
#pragma unroll
    for (int j = 1; j < kOutputs; ++j) m_block = f_max(m_block, highest[j]);
    m_block = f_add(m_block, 0.0f);  // -0 counts as +0
    if (is_inside) weights[VOX_LOCAL] = f_exp(f_sub(s, m_block));
    VOX_BARRIER();
    const bool is_first = b == first_block;
    const Shares shares = shares_of(is_first ? m_block : m, m_block);
    float l_block = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidestHead / kGroup; ++i) {
      const int32_t c = VOX_LOCAL + i * kGroup;
      if (i > 0 && c >= args.head_dim) continue;
      // A thread beyond the head sums the weights too, and reads a channel that is there.
      const float* value = values + cache * kBlock * args.value_stride + (c < args.head_dim ? c : 0);
      float o_block = 0.0f, sum = 0.0f;
#pragma unroll 32
      for (int32_t j = begin; j < end; ++j) {
        sum = PlainSum::step(weights[j], sum);
        o_block = f_fma(weights[j], value[(int64_t)j * args.value_stride], o_block);
      }
      if (i == 0) l_block = sum;
      o[i] = is_first ? o_block : block_folded(o[i], shares.old_share, o_block, shares.new_share);
    }
    l = is_first ? l_block : block_folded(l, shares.old_share, l_block, shares.new_share);
    m = shares.m;
  }
#pragma unroll
  for (int i = 0; i < kWidestHead / kGroup; ++i) {
    const int32_t c = VOX_LOCAL + i * kGroup;
    if (c < args.head_dim) {
      const float y = f_div(o[i], l);
      out[start_of_query + c] = y;
      VOX_WATCH(y, VOX_GROUP_Y);
    }
  }
}

// --- norm -------------------------------------------------------------------------------------------------------

// vox_norm for rows of at most kWidest chunks: read once, side by side, and summed from shared memory.
VOX_KERNEL(vox_norm_staged)(VOX_IN(float, x, 0), VOX_IN(float, weight, 1), VOX_OUT(float, out, 2),
                            VOX_OUT(int32_t, faults, 3), VOX_ARGS(NormArgs, 4)) {
  VOX_SHARED float staged[kStaged];
  VOX_SHARED float sums[kWidest];
  const int64_t start = (VOX_GROUP_Y * args.heads + VOX_GROUP_X) * args.width;
  const int32_t chunks = (args.width - 1) / (int32_t)kChunk + 1;
  for (int32_t c = 0; c < chunks; ++c) {
    const int32_t i = c * (int32_t)kChunk + VOX_LOCAL;
    if (i < args.width) staged[c * ((int32_t)kChunk + 1) + VOX_LOCAL] = x[start + i];
  }
  VOX_BARRIER();
  if (VOX_LOCAL < chunks) {
    const int32_t left = args.width - VOX_LOCAL * (int32_t)kChunk, terms = left < (int32_t)kChunk ? left : (int32_t)kChunk;
    float p = 0.0f;
#pragma unroll 8
    for (int32_t k = 0; k < terms; ++k) p = SumOfSquares::step(staged[VOX_LOCAL * ((int32_t)kChunk + 1) + k], p);
    sums[VOX_LOCAL] = p;
  }
  VOX_BARRIER();
  float sum = 0.0f;
  for (int32_t c = 0; c < chunks; ++c) sum = chunk_folded(c == 0, sum, sums[c]);
  const float inverse = norm_inverse(sum, (float)args.width, args.eps);
  for (int32_t c = 0; c < chunks; ++c) {
    const int32_t i = c * (int32_t)kChunk + VOX_LOCAL;
    if (i < args.width) {
      // An infinite sum makes every output zero, and would hide: the row is NaN instead.
      const float y = is_finite(sum) ? normed(staged[c * ((int32_t)kChunk + 1) + VOX_LOCAL], inverse, weight[i])
                                     : f_from(0x7FC00000);
      out[start + i] = y;
      VOX_WATCH(y, VOX_GROUP_Y);
    }
  }
}
