// Attention of a few rows: a group has G query heads that share a key/value head, over one KV block of one row; the
// group that comes last folds the blocks' parts in their order. Loops are short on purpose: code that is run once
// by each group, and is larger than the multiprocessor's cache of instructions, is fetched slower than it is done.

namespace vox {
namespace VOX_ISA {

// Keys of one slot over channels, or values of one channel over slots, that a thread has on their way: two parts.
enum {
  kPart = 16,
  kOfHead = kGroup / 32,  // blocks of codes
};
struct HeadPart {
  float terms[kPart];
};

struct AttendFew {
  Attend at;
  AttendArgs args;
  int64_t row, head;
  int32_t begin, end;  // slots of the block that are seen
  const float *key, *value;  // of the thread

  CANON bool is_inside(const AttendFew& it) { return VOX_LOCAL >= it.begin && VOX_LOCAL < it.end; }

  CANON void fetch_keys(const AttendFew& it, HeadPart& to, int32_t part) {
    if (!is_inside(it) || part * kPart >= it.args.head_dim) return;
    const float* from = it.key + part * kPart * (int32_t)kBlock;
    const int32_t left = it.args.head_dim - part * kPart;
#pragma unroll
    for (int i = 0; i < kPart; ++i)
      if (i < left) to.terms[i] = early(from + i * (int32_t)kBlock);
  }
  // A block's room is whole: slots that nobody wrote may be read, and are not used.
  CANON void fetch_values(const AttendFew& it, HeadPart& to, int32_t part) {
    if (part * kPart >= it.end) return;
    const float* from = it.value + part * kPart * it.args.value_stride;
#pragma unroll
    for (int i = 0; i < kPart; ++i) to.terms[i] = early(from + i * it.args.value_stride);
  }

  template <int G>
  CANON void multiply_keys(const AttendFew& it, const HeadPart& part, int32_t number, float (&p)[G]) {
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
      if (number * kPart + i >= it.args.head_dim) continue;  // a head has a multiple of four channels
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const Quad x = *(const Quad*)(it.at.query + g * kGroup + number * kPart + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) p[g] = f_fma(x.values[j], part.terms[i + j], p[g]);
      }
    }
  }
  // `l` is that of the thread's own head.
  template <int G>
  CANON void multiply_values(const AttendFew& it, const HeadPart& part, int32_t number, float (&o)[G], float& l) {
    const int32_t first = number * kPart;
    const float* own = it.at.weights + VOX_LOCAL % G * kGroup;
    if (first >= it.begin && first + kPart <= it.end) {
#pragma unroll
      for (int i = 0; i < kPart; i += 4) {
        const Quad mine = *(const Quad*)(own + first + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) l = PlainSum::step(mine.values[j], l);
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const Quad w = *(const Quad*)(it.at.weights + g * kGroup + first + i);
#pragma unroll
          for (int j = 0; j < 4; ++j) o[g] = f_fma(w.values[j], part.terms[i + j], o[g]);
        }
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kPart; ++i) {
      if (first + i < it.begin || first + i >= it.end) continue;
      l = PlainSum::step(own[first + i], l);
#pragma unroll
      for (int g = 0; g < G; ++g) o[g] = f_fma(it.at.weights[g * kGroup + first + i], part.terms[i], o[g]);
    }
  }

  // Divide, write, and make codes: a thread a block for the scales, then a thread four channels.
  template <int G>
  CANON void write(const AttendFew& it, const float (&o)[G], const float (&l)[G]) {
    const int32_t width = it.args.head_dim, c = VOX_LOCAL, columns = it.args.heads * width;
    VOX_BARRIER();
#pragma unroll
    for (int g = 0; g < G; ++g) {
      if (c >= width) continue;
      const float y = f_div(o[g], l[g]);
      it.at.out[it.row * columns + (it.head + g) * width + c] = y;
      if (!is_finite(y)) it.at.faults[it.row] = 1;
      it.at.weights[g * kGroup + c] = y;
    }
    if (it.args.codes_out == kNoCodes) return;
    VOX_BARRIER();
    const bool is_in_tiles = it.args.codes_out == kCodesOfTiles;
    const int32_t first = c % kOfHead * 32;
    if (c < G * kOfHead && first < width) {
      int32_t amax = 0;
#pragma unroll
      for (int j = 0; j < 32; j += 4) {
        const int32_t four = four_magnitude(*(const Quad*)(it.at.weights + c / kOfHead * kGroup + first + j));
        amax = four > amax ? four : amax;
      }
      const float d = activation_scale(amax);
      it.at.highest[c] = code_inverse(d, amax);
      const int64_t column = (it.head + c / kOfHead) * width + first;
      it.at.scales[code_scale_at(is_in_tiles, it.row, column / 32, columns / 32)] = d;
    }
    VOX_BARRIER();
    const int32_t channel = c * 4 % kGroup, g = c * 4 / kGroup;
    if (g >= G || channel >= width) return;
    const uint32_t word =
        four_codes(*(const Quad*)(it.at.weights + g * kGroup + channel), it.at.highest[g * kOfHead + channel / 32]);
    *(uint32_t*)(it.at.codes + code_at(is_in_tiles, it.row, (it.head + g) * width + channel, columns)) = word;
  }

  template <int G>
  CANON void run(const Attend& at, const AttendArgs& args) {
    wait_for_inputs();
    const int32_t sets = args.heads / G;  // of query heads, a group each
    const int64_t set = VOX_GROUP_X % sets, index = VOX_GROUP_X / sets, row = VOX_GROUP_Y;
    const int64_t head = set * G, kv_head = head / (args.heads / args.kv_heads);
    const int32_t last = at.positions[row];
    const int32_t low = args.window > 0 && last >= args.window ? last - args.window + 1 : 0;
    const int32_t first_block = low / (int32_t)kBlock, b = first_block + (int32_t)index;
    const int32_t count = last / (int32_t)kBlock - first_block + 1;
    if (index >= count) return;
    const int32_t width = args.head_dim, start = b * (int32_t)kBlock;
    const int64_t cache =
        (int64_t)at.block_tables[(int64_t)at.sequences[row] * args.blocks_per_sequence + b] * args.kv_heads + kv_head;
    const AttendFew it = {at,
                          args,
                          row,
                          head,
                          low > start ? low - start : 0,
                          last - start < (int32_t)kBlock ? last - start + 1 : (int32_t)kBlock,
                          at.keys + cache * width * kBlock + VOX_LOCAL,
                          at.values + cache * kBlock * args.value_stride + (VOX_LOCAL < width ? VOX_LOCAL : 0)};
    HeadPart even, odd;
    fetch_keys(it, even, 0);
    fetch_keys(it, odd, 1);
    if (is_inside(it))
      for (int32_t c = 0; c < width; c += 32)
        expect(at.values + (cache * kBlock + VOX_LOCAL) * args.value_stride + c);
    if (VOX_LOCAL < width)
#pragma unroll
      for (int g = 0; g < G; ++g) at.query[g * kGroup + VOX_LOCAL] = at.q[(row * args.heads + head + g) * width + VOX_LOCAL];
    VOX_BARRIER();
    float s[G];
#pragma unroll
    for (int g = 0; g < G; ++g) s[g] = 0.0f;
#pragma unroll 1
    for (int32_t part = 0; part * kPart < width; part += 2) {
      multiply_keys(it, even, part, s);
      fetch_keys(it, even, part + 2);
      multiply_keys(it, odd, part + 1, s);
      fetch_keys(it, odd, part + 3);
    }
    int32_t part = it.begin / kPart;
    fetch_values(it, even, part);
    fetch_values(it, odd, part + 1);
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float y = f_mul(s[g], args.scale);
      if (args.softcap != 0.0f) y = f_softcap(y, args.softcap);
      s[g] = is_inside(it) ? y : f_from((int32_t)0xFF800000u);
      at.weights[g * kGroup + VOX_LOCAL] = s[g];
    }
    VOX_BARRIER();
    if (VOX_LOCAL < 16 * G) {
      const float* of = at.weights + VOX_LOCAL / 16 * kGroup + VOX_LOCAL % 16;
      float most = of[0];
#pragma unroll
      for (int j = 1; j < kGroup / 16; ++j) most = f_max(most, of[16 * j]);
      at.highest[VOX_LOCAL] = most;
    }
    VOX_BARRIER();
    float m[G], l[G], o[G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      m[g] = at.highest[16 * g];
#pragma unroll
      for (int j = 1; j < 16; ++j) m[g] = f_max(m[g], at.highest[16 * g + j]);
      m[g] = f_add(m[g], 0.0f);  // -0 counts as +0
      if (is_inside(it)) at.weights[g * kGroup + VOX_LOCAL] = f_exp(f_sub(s[g], m[g]));
      o[g] = 0.0f;
    }
    VOX_BARRIER();
    float own = 0.0f;
#pragma unroll 1
    for (; part * kPart < it.end; part += 2) {
      multiply_values(it, even, part, o, own);
      fetch_values(it, even, part + 2);
      multiply_values(it, odd, part + 1, o, own);
      fetch_values(it, odd, part + 3);
    }
    if (VOX_LOCAL < G) at.highest[VOX_LOCAL] = own;
    VOX_BARRIER();
#pragma unroll
    for (int g = 0; g < G; ++g) l[g] = at.highest[g];
    if (count > 1) {
      const int64_t size = (int64_t)width + 2;
      float* parts = at.parts + ((row * args.heads + head) * args.blocks_per_sequence) * size;
      const int64_t of_head = args.blocks_per_sequence * size;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        float* mine = parts + g * of_head + index * size;
        if (VOX_LOCAL < width) mine[VOX_LOCAL] = o[g];
        if (VOX_LOCAL == 0) {
          mine[width] = m[g];
          mine[width + 1] = l[g];
        }
      }
      see_all();
      VOX_BARRIER();
      if (VOX_LOCAL == 0) at.magnitudes[0] = arrived(at.counters + row * sets + set);
      VOX_BARRIER();
      if (at.magnitudes[0] != count - 1) return;
      if (VOX_LOCAL == 0) at.counters[row * sets + set] = 0;
      see_all();
      // The next block's part is on its way while one is folded.
      const int32_t c = VOX_LOCAL < width ? VOX_LOCAL : 0;
      float m_next[G], l_next[G], o_next[G];
      auto fetch = [&](int32_t k) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const float* other = parts + g * of_head + k * size;
          m_next[g] = early(other + width);
          l_next[g] = early(other + width + 1);
          o_next[g] = early(other + c);
        }
      };
      fetch(0);
#pragma unroll 1
      for (int32_t k = 0; k < count; ++k) {
        const bool is_first = k == 0;
        float m_block[G], l_block[G], o_block[G];
#pragma unroll
        for (int g = 0; g < G; ++g) {
          m_block[g] = m_next[g];
          l_block[g] = l_next[g];
          o_block[g] = o_next[g];
        }
        if (k + 1 < count) fetch(k + 1);
#pragma unroll
        for (int g = 0; g < G; ++g) {
          const Shares shares = shares_of(is_first ? m_block[g] : m[g], m_block[g]);
          o[g] = is_first ? o_block[g] : block_folded(o[g], shares.old_share, o_block[g], shares.new_share);
          l[g] = is_first ? l_block[g] : block_folded(l[g], shares.old_share, l_block[g], shares.new_share);
          m[g] = shares.m;
        }
      }
    }
    write(it, o, l);
  }
};

enum {
  kFewQuads1 = kGroup / 4,
  kFewQuads2 = 2 * kFewQuads1,
  kFewQuads4 = 4 * kFewQuads1,
};

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_ATTEND_FEW(G)                                                                                            \
  VOX_KERNEL_AT_ONCE(4, vox_step_attend_few_##G)(                                                                         \
      VOX_IN(float, q, 0), VOX_IN(float, keys, 1), VOX_IN(float, values, 2), VOX_IN(int32_t, positions, 3),               \
      VOX_IN(int32_t, sequences, 4), VOX_IN(int32_t, block_tables, 5), VOX_OUT(float, parts, 6),                          \
      VOX_OUT(int32_t, counters, 7), VOX_OUT(float, out, 8), VOX_OUT(int8_t, codes, 9), VOX_OUT(float, scales, 10),       \
      VOX_OUT(int32_t, faults, 11), VOX_ARGS(AttendArgs, 12)) {                                                           \
    VOX_SHARED Quad query[kFewQuads##G];                                                                                  \
    VOX_SHARED Quad weights[kFewQuads##G];                                                                                \
    VOX_SHARED float highest[kHighest##G];                                                                                \
    VOX_SHARED int32_t magnitudes[4];                                                                                     \
    const Attend at = {q,      keys, values,  positions, sequences, block_tables,         parts, counters, out, codes, scales, \
                       faults, (float*)(Quad*)query, (float*)(Quad*)weights, highest, magnitudes};                        \
    AttendFew::run<G>(at, args);                                                                                          \
  }
VOX_STEP_ATTEND_FEW(1)
VOX_STEP_ATTEND_FEW(2)
VOX_STEP_ATTEND_FEW(4)
#undef VOX_STEP_ATTEND_FEW
