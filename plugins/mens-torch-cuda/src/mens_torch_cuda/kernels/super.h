// Weights in super-blocks of 256, a code a byte, beside what scales them: the bits of grid/quantised.h.
//
// Codes lie as those of Q8_0 do (packed.h). Beside them two pieces for each super-block of an output: first d and
// dmin as float16 and the minima of eight sub-blocks of 32, then the scales of sixteen sub-blocks of 16. Where a
// format has eight scales, each stands twice: the sums are the same integers.

namespace vox {
namespace VOX_ISA {

enum { kSuper = 256, kSuperPieces = kSuper / 16 };

template <bool HasMinima>
struct SuperOf {
  const int8_t* codes;
  const float* scales;
  const Piece* weight;
  const Piece* sides;
  int64_t first_row;
  enum { staged = 0, columns = kSuper };

  CANON void stage(const SuperOf&, const PackedArgs&, int64_t, int32_t, float*) {}

  template <int Rows>
  CANON void chunk(const SuperOf& in, const PackedArgs& args, int64_t n, int32_t b, const float*, float* p) {
    const int32_t blocks = args.columns / kSuper;
    const Piece side = in.sides[piece_at(n, 2 * b, 2 * blocks)], scale = in.sides[piece_at(n, 2 * b + 1, 2 * blocks)];
    Piece w[kSuperPieces];
#pragma unroll
    for (int i = 0; i < kSuperPieces; ++i)
      w[i] = in.weight[piece_at(n, (int64_t)b * kSuperPieces + i, blocks * kSuperPieces)];
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      const int64_t row = in.first_row + r < args.rows ? in.first_row + r : args.rows - 1;
      const Piece* x = (const Piece*)(in.codes + row * args.columns + (int64_t)b * kSuper);
      int32_t u = 0, v = 0;
#pragma unroll
      for (int i = 0; i < kSuperPieces; ++i) {
        const Piece a = x[i];
        int32_t dot = 0, sum = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          dot = dot4(w[i].words[k], a.words[k], dot);
          if (HasMinima) sum = dot4(0x01010101u, a.words[k], sum);
        }
        u += (int32_t)(int8_t)(scale.words[i / 4] >> 8 * (i % 4)) * dot;
        if (HasMinima) v += (int32_t)(side.words[1 + i / 8] >> 8 * (i / 2 % 4) & 255u) * sum;
      }
      const float d = in.scales[row * blocks + b];
      p[r] = block_chained(0.0f, f16_widened(side.words[0] & 0xFFFFu), d, u);
      if (HasMinima) p[r] = less_minima(p[r], f16_widened(side.words[0] >> 16), d, v);
    }
  }
};

template <class F>
CANON void pack_super(BlockBytes source, Piece* out, Piece* sides, const PackArgs& args, int64_t n, int64_t b, int32_t d_at) {
  if (n >= args.padded) return;
  const int64_t blocks = args.columns / kSuper;
  const bool is_there = n < args.outputs;
  BlockBytes block = source + (n * blocks + b) * F::bytes;
  for (int i = 0; i < kSuperPieces; ++i) {
    Piece piece = {{0, 0, 0, 0}};
    if (is_there)
      for (int k = 0; k < 16; ++k) piece.words[k / 4] |= ((uint32_t)F::code(block, 16 * i + k) & 255u) << 8 * (k % 4);
    out[piece_at(n, b * kSuperPieces + i, blocks * kSuperPieces)] = piece;
  }
  Piece side = {{0, 0, 0, 0}}, scale = {{0, 0, 0, 0}};
  if (is_there) {
    side.words[0] = two_bytes(block + d_at) | (F::has_minima ? two_bytes(block + 2) << 16 : 0u);
    for (int j = 0; j < 8 * F::has_minima; ++j) side.words[1 + j / 4] |= (uint32_t)F::minimum(block, j) << 8 * (j % 4);
    for (int j = 0; j < 16; ++j)
      scale.words[j / 4] |= ((uint32_t)F::scale(block, j * 16 / F::sub) & 255u) << 8 * (j % 4);
  }
  sides[piece_at(n, 2 * b, 2 * blocks)] = side;
  sides[piece_at(n, 2 * b + 1, 2 * blocks)] = scale;
}

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_PACK_SUPER(suffix, F, d_at)                                                                            \
  VOX_KERNEL(vox_pack_##suffix)(VOX_IN(uint8_t, source, 0), VOX_OUT(Piece, out, 1), VOX_OUT(Piece, sides, 2),       \
                                VOX_ARGS(PackArgs, 3)) {                                                           \
    pack_super<F>(source, out, sides, args, VOX_THREAD_X, VOX_THREAD_Y, d_at);                                      \
  }
VOX_PACK_SUPER(q4_k, FileQ4_K, 0)
VOX_PACK_SUPER(q5_k, FileQ5_K, 0)
VOX_PACK_SUPER(q6_k, FileQ6_K, 208)
#undef VOX_PACK_SUPER

#define VOX_PACKED_SUPER(suffix, has_minima, rows)                                                                 \
  VOX_KERNEL(vox_packed_##suffix##_##rows)(VOX_IN(int8_t, codes, 0), VOX_IN(float, scales, 1),                     \
                                           VOX_IN(Piece, weight, 2), VOX_IN(Piece, sides, 3), VOX_OUT(float, out, 4), \
                                           VOX_OUT(int32_t, faults, 5), VOX_ARGS(PackedArgs, 6)) {                 \
    VOX_SHARED float partials[kPartials];                                                                          \
    const SuperOf<has_minima> in{codes, scales, weight, sides, VOX_GROUP_Y * rows};                                 \
    packed_linear<rows>(in, out, faults, args, partials, partials);                                                \
  }
VOX_PACKED_SUPER(q4_k, true, 1)
VOX_PACKED_SUPER(q4_k, true, 8)
VOX_PACKED_SUPER(q6_k, false, 1)
VOX_PACKED_SUPER(q6_k, false, 8)
#undef VOX_PACKED_SUPER

#define VOX_EMBED_SUPER(suffix, has_minima)                                                                        \
  VOX_KERNEL(vox_embed_packed_##suffix)(VOX_IN(int8_t, table, 0), VOX_IN(Piece, sides, 1), VOX_IN(int32_t, ids, 2), \
                                        VOX_OUT(float, out, 3), VOX_OUT(int32_t, faults, 4),                       \
                                        VOX_ARGS(PackedEmbedArgs, 5)) {                                            \
    const int64_t k = VOX_THREAD_X, n = ids[VOX_THREAD_Y], blocks = args.columns / kSuper, b = k / kSuper;          \
    if (k >= args.columns) return;                                                                                 \
    const Piece side = sides[piece_at(n, 2 * b, 2 * blocks)], four = sides[piece_at(n, 2 * b + 1, 2 * blocks)];      \
    const int32_t i = (int32_t)(k % kSuper), j = i / 16;                                                           \
    const int32_t scale = (int32_t)(int8_t)(four.words[j / 4] >> 8 * (j % 4));                                     \
    const int32_t code = table[piece_at(n, k / 16, args.columns / 16) * 16 + k % 16];                              \
    const float d = f16_widened(side.words[0] & 0xFFFFu);                                                          \
    float w;                                                                                                       \
    if (has_minima)                                                                                                \
      w = weight_of(d, scale, code, f16_widened(side.words[0] >> 16),                                              \
                    (int32_t)(side.words[1 + i / 128] >> 8 * (i / 32 % 4) & 255u));                                \
    else                                                                                                           \
      w = weight_of(d, scale, code);                                                                               \
    const float y = f_mul(w, args.scale);                                                                          \
    out[VOX_THREAD_Y * args.columns + k] = y;                                                                      \
    VOX_WATCH(y, VOX_THREAD_Y);                                                                                    \
  }
VOX_EMBED_SUPER(q4_k, true)
VOX_EMBED_SUPER(q6_k, false)
#undef VOX_EMBED_SUPER

// vox_quantise_256 with a group for each block, two elements a thread.
VOX_KERNEL(vox_quantise_256_wide)(VOX_IN(float, x, 0), VOX_OUT(int8_t, codes, 1), VOX_OUT(float, scales, 2),
                                  VOX_ARGS(QuantiseArgs, 3)) {
  VOX_SHARED int32_t magnitudes[kGroup];
  const int64_t at = VOX_GROUP_Y * args.columns + VOX_GROUP_X * kSuper + VOX_LOCAL;
  const float one = x[at], other = x[at + kGroup];
  const int32_t bits = f_bits(one) & 0x7FFFFFFF, other_bits = f_bits(other) & 0x7FFFFFFF;
  magnitudes[VOX_LOCAL] = bits > other_bits ? bits : other_bits;
  VOX_BARRIER();
  int32_t amax = 0;
#pragma unroll 8
  for (int i = 0; i < kGroup; ++i) amax = magnitudes[i] > amax ? magnitudes[i] : amax;
  const float d = activation_scale(amax), inverse = has_codes(d) ? activation_inverse(amax) : 0.0f;
  if (VOX_LOCAL == 0) scales[VOX_GROUP_Y * (args.columns / kSuper) + VOX_GROUP_X] = d;
  codes[at] = has_codes(d) ? (int8_t)activation_code(one, inverse) : (int8_t)0;
  codes[at + kGroup] = has_codes(d) ? (int8_t)activation_code(other, inverse) : (int8_t)0;
}
