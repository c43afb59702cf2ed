// Attention of some rows, each of another sequence, with what stands before it: as one_row.h, and for query heads that
// share a key/value head. A group's threads are two halves, which take the row's KV blocks in turn; keys and values are
// on their way to shared memory all the time, some channels or slots at once. Nothing goes from group to group.

namespace vox {
namespace VOX_ISA {

enum {
  kHalfOfGroup = kGroup / 2,
  kSomeTerms = 16,  // channels of keys, or slots of values, of a stage
  kSomeStage = kSomeTerms * (int)kBlock,
  kSomeRingQuads3 = 2 * 3 * kSomeStage / 4,  // three stages of a half
  kSomeRingQuads6 = 2 * 6 * kSomeStage / 4,
  kSomePitch = kOneWidth + 4,  // of heads that are normed side by side
  kSomeNewQuads = 2 * kOneQuads,
  kSomeRoomQuads1 = 2 * kOneQuads + 8,  // weights of the halves; before, raw heads
  kSomeRoomQuads2 = 4 * kOneQuads,
  kSomeRoomQuads4 = 8 * kOneQuads,
  kSomeSumQuads = 10,  // of squares; maxima of the halves, [2][G][4]; m and l of a block
};

// Of half of a group.
CANON void half_barrier(int half) {
#if defined(__CUDA_ARCH__)
  // Numbers that the compiler sees: a group is given as many barriers as it may use.
  if (half == 0)
    asm volatile("bar.sync 1, 64;" ::: "memory");
  else
    asm volatile("bar.sync 2, 64;" ::: "memory");
#else
  VOX_BARRIER();
#endif
}

struct SomeRows {  // group (query heads that share a key/value head, row)
  OneRow in;      // its query is [G][kOneWidth]
  float* heads;   // raw queries and the key, [G + 1][kSomePitch]
  float* newest;  // key and value of the row itself, [2][kOneWidth]
  float* weights; // [2][G][kBlock]
  float* ring;    // [2][Ring][kSomeStage]

  // What a thread needs to norm and rotate its pairs of channels.
  template <int G>
  struct Turns {
    enum { each = G / 2 + 1 };
    float weights[each][2], cosines[each], sines[each];
  };

  template <int G>
  CANON void turns(const SomeRows& it, int32_t width, int64_t angles, Turns<G>& to) {
    const int32_t pairs = width / 2;
#pragma unroll
    for (int i = 0; i < Turns<G>::each; ++i) {
      const int32_t t = VOX_LOCAL + i * kGroup, pair = t % pairs;
      const float* weight = t / pairs < G ? it.in.q_norm : it.in.k_norm;
      to.weights[i][0] = early(weight + pair);
      to.weights[i][1] = early(weight + pair + pairs);
      to.cosines[i] = early(it.in.table + angles + pair);
      to.sines[i] = early(it.in.table + angles + pairs + pair);
    }
  }

  // Queries and the key are normed and rotated, and what is new is stored by the first group that has it.
  template <int G>
  CANON void place(const SomeRows& it, const OneRowArgs& args, const Turns<G>& turns, int32_t slot, int64_t cache,
                   bool stores) {
    const OneRow& in = it.in;
    const int32_t width = args.head_dim, pairs = width / 2, c = VOX_LOCAL;
    const int64_t row = VOX_GROUP_Y;
    VOX_BARRIER();
    if (c <= G) in.sums[c] = squares_of<2>(it.heads + c * kSomePitch, width);
    if (stores && c < width) in.values[(cache * kBlock + slot) * args.value_stride + c] = it.newest[kOneWidth + c];
    VOX_BARRIER();
#pragma unroll
    for (int i = 0; i < Turns<G>::each; ++i) {
      const int32_t t = c + i * kGroup, head = t / pairs, pair = t % pairs;
      if (head > G) continue;
      const bool is_query = head < G;
      const float* raw = it.heads + head * kSomePitch;
      const float sum = chunk_folded(true, 0.0f, in.sums[head]);
      const float inverse = norm_inverse(sum, (float)width, args.eps);
      // An infinite sum makes every output zero, and would hide: the head is NaN instead.
      const float one = is_finite(sum) ? normed(raw[pair], inverse, turns.weights[i][0]) : f_from(0x7FC00000);
      const float other = is_finite(sum) ? normed(raw[pair + pairs], inverse, turns.weights[i][1]) : f_from(0x7FC00000);
      if (!is_finite(one) || !is_finite(other)) (is_query ? in.q_norm_faults : in.k_norm_faults)[row] = 1;
      const Halves<float> y = rotated(one, other, turns.cosines[i], turns.sines[i]);
      if (!is_finite(y.first) || !is_finite(y.second)) (is_query ? in.q_rope_faults : in.k_rope_faults)[row] = 1;
      float* to = is_query ? in.query + head * kOneWidth : it.newest;
      to[pair] = y.first;
      to[pair + pairs] = y.second;
      if (!is_query && stores) {
        in.keys[(cache * width + pair) * kBlock + slot] = y.first;
        in.keys[(cache * width + pair + pairs) * kBlock + slot] = y.second;
      }
    }
    VOX_BARRIER();
  }

  // Terms [kSomeTerms][kBlock] of two neighbours with those of G heads, [G][kBlock]; four at a time, up to `count`.
  template <int G>
  CANON void multiply(const float* own, const float* heads, int32_t count, float (&p)[G][2]) {
    Two terms[kSomeTerms];
#pragma unroll
    for (int i = 0; i < kSomeTerms; ++i)
      if (i < count) terms[i] = *(const Two*)(own + i * (int)kBlock);
#pragma unroll
    for (int i = 0; i < kSomeTerms; i += 4) {
      if (i >= count) continue;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const Quad x = *(const Quad*)(heads + g * (int)kBlock + i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int q = 0; q < 2; ++q) p[g][q] = f_fma(x.values[j], terms[i + j].values[q], p[g][q]);
      }
    }
  }

  // `Ring` stages of a half.
  template <int G, int Ring>
  CANON void run(const SomeRows& it, const Attend& at, const OneRowArgs& args, const AttendArgs& of_heads) {
    const OneRow& in = it.in;
    wait_for_inputs();
    const int64_t row = VOX_GROUP_Y;
    // Halves whose blocks are longest shall not all lie on the same quarters of a multiprocessor.
    const int half = VOX_LOCAL / kHalfOfGroup ^ (int)((VOX_GROUP_X + row * (args.heads / G)) / 128 % 2);
    const int own = VOX_LOCAL % kHalfOfGroup, two = 2 * own, four = own % 32 * 4, parity = own / 32;
    const int32_t width = args.head_dim, stride = args.value_stride, sharing = args.heads / args.kv_heads;
    const int32_t head = (int32_t)VOX_GROUP_X * G, kv_head = head / sharing, c = VOX_LOCAL < width ? VOX_LOCAL : 0;
    float raw[G];
#pragma unroll
    for (int g = 0; g < G; ++g) raw[g] = early(in.q + (row * args.heads + head + g) * width + c);
    const float k = early(in.k + (row * args.kv_heads + kv_head) * width + c);
    const float v = early(in.v + (row * args.kv_heads + kv_head) * width + c);
    const int32_t last = in.positions[row], slot = last % (int32_t)kBlock, last_block = last / (int32_t)kBlock;
    const int32_t low = args.window > 0 && last >= args.window ? last - args.window + 1 : 0;
    const int32_t first_block = low / (int32_t)kBlock;
    const int32_t* table = in.block_tables + (int64_t)in.sequences[row] * args.blocks_per_sequence;
    const int64_t angles = ((int64_t)in.slots[last_block] * kBlock + slot) * width;
    const int32_t newest = table[last_block], of_keys = (width + kSomeTerms - 1) / kSomeTerms;
    auto begin_of = [&](int32_t b) { return low > b * (int32_t)kBlock ? low - b * (int32_t)kBlock : 0; };
    auto end_of = [&](int32_t b) { return b == last_block ? slot + 1 : (int32_t)kBlock; };
    // What is sent next: stage `sending` of `stages` of block `to_send`, keys first, to a place of the half's ring;
    // from where the thread's part of it lies. Where the next stage is used.
    float* ring = it.ring + half * Ring * kSomeStage;
    int32_t to_send = first_block + half, sending = 0, stages = 0, free = 0, used = 0, begin_sent = 0, end_sent = 0;
    int32_t entry = to_send <= last_block ? table[to_send] : 0;
    const float *keys = in.keys, *values = in.values;
    auto send = [&]() {
      if (to_send <= last_block) {
        if (sending == 0) {
          const int64_t cache = (int64_t)entry * args.kv_heads + kv_head;
          begin_sent = begin_of(to_send);
          end_sent = end_of(to_send);
          keys = in.keys + (cache * width + parity) * kBlock + four;
          values = in.values + (cache * kBlock + begin_sent / kSomeTerms * kSomeTerms + parity) * stride + four;
          stages = of_keys + (end_sent - 1) / kSomeTerms - begin_sent / kSomeTerms + 1;
          if (to_send + 2 <= last_block) entry = table[to_send + 2];
        }
        float* to = ring + free * kSomeStage + parity * (int)kBlock + four;
        if (sending < of_keys) {
          const int32_t left = width - sending * kSomeTerms - parity;
          if (four + 4 > begin_sent && four < end_sent)
#pragma unroll
            for (int i = 0; i < kSomeTerms; i += 2)
              if (i < left) sent<16>(to + i * (int)kBlock, keys + i * (int)kBlock);
          keys += kSomeStage;
        } else {
          const int32_t j = (sending - of_keys + begin_sent / kSomeTerms) * kSomeTerms + parity;
          if (four < width)
#pragma unroll
            for (int i = 0; i < kSomeTerms; i += 2)
              if (j + i >= begin_sent && j + i < end_sent) sent<16>(to + i * (int)kBlock, values + i * stride);
          values += kSomeTerms * stride;
        }
        free = free + 1 == Ring ? 0 : free + 1;
        sending += 1;
        if (sending == stages) {
          sending = 0;
          to_send += 2;
        }
      }
      end_of_stage();
    };
#pragma unroll
    for (int s = 0; s < Ring - 1; ++s) send();
    Turns<G> own_turns;
    turns(it, width, angles, own_turns);
    if (VOX_LOCAL < width) {
#pragma unroll
      for (int g = 0; g < G; ++g) it.heads[g * kSomePitch + c] = raw[g];
      it.heads[G * kSomePitch + c] = k;
      it.newest[kOneWidth + c] = v;
    }
    place(it, args, own_turns, slot, (int64_t)newest * args.kv_heads + kv_head, head % sharing == 0);
    float* weights = it.weights + half * G * (int)kBlock;
    float *highest = in.sums + half * 4 * G, *ends = in.sums + 8 * G;
    float m[G], o[G][2], l = 0.0f;  // the first half's; l is that of the thread's own head
    const int of_head = own % G;
#pragma unroll
    for (int g = 0; g < G; ++g) m[g] = o[g][0] = o[g][1] = 0.0f;
    for (int32_t first = first_block; first <= last_block; first += 2) {
      const int32_t b = first + half;
      const bool is_there = b <= last_block;
      const int32_t begin = is_there ? begin_of(b) : 0, end = is_there ? end_of(b) : 0;
      float s[G][2];
#pragma unroll
      for (int g = 0; g < G; ++g) s[g][0] = s[g][1] = 0.0f;
      // Both halves go through all loops: threads meet at each barrier wherever they run.
#pragma unroll 1
      for (int32_t at_channel = 0; at_channel < width; at_channel += kSomeTerms) {
        float* stage = ring + used * kSomeStage;
        if (is_there) {
          used = used + 1 == Ring ? 0 : used + 1;
          arrived_but<Ring - 2>();
          // The row's own key is in no memory yet; who sent what lies there puts it in its place.
          if (b == last_block && four == slot / 4 * 4)
#pragma unroll
            for (int i = 0; i < kSomeTerms; i += 2)
              if (at_channel + i + parity < width) stage[(i + parity) * (int)kBlock + slot] = it.newest[at_channel + i + parity];
        }
        half_barrier(half);
        if (!is_there) continue;
        send();
        if (two + 2 > begin && two < end)
          multiply<G>(stage + two, in.query + at_channel, width - at_channel, s);
      }
#pragma unroll
      for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          float y = f_mul(chunk_folded(true, 0.0f, s[g][q]), args.scale);
          if (args.softcap != 0.0f) y = f_softcap(y, args.softcap);
          s[g][q] = two + q >= begin && two + q < end ? y : f_from((int32_t)0xFF800000u);
        }
        weights[g * (int)kBlock + own] = f_max(s[g][0], s[g][1]);
      }
      half_barrier(half);
      if (own < 4 * G) {
        const float* of = weights + own / 4 * (int)kBlock + own % 4 * 16;
        float most = of[0];
#pragma unroll
        for (int j = 0; j < 16; j += 4) {
          const Quad some = *(const Quad*)(of + j);
#pragma unroll
          for (int q = 0; q < 4; ++q) most = f_max(most, some.values[q]);
        }
        highest[own] = most;
      }
      half_barrier(half);
      float m_block[G], fresh[G][2], l_block = 0.0f;
#pragma unroll
      for (int g = 0; g < G; ++g) {
        const Quad four_parts = *(const Quad*)(highest + 4 * g);
        m_block[g] = f_max(f_max(four_parts.values[0], four_parts.values[1]), f_max(four_parts.values[2], four_parts.values[3]));
        m_block[g] = f_add(m_block[g], 0.0f);  // -0 counts as +0
        Two w;
#pragma unroll
        for (int q = 0; q < 2; ++q) {
          w.values[q] = f_exp(f_sub(s[g][q], m_block[g]));
          fresh[g][q] = 0.0f;
        }
        *(Two*)(weights + g * (int)kBlock + two) = w;
      }
#pragma unroll 1
      for (int32_t at_slot = 0; at_slot < (int32_t)kBlock; at_slot += kSomeTerms) {
        const bool is_seen = at_slot + kSomeTerms > begin && at_slot < end;
        float* stage = ring + used * kSomeStage;
        if (is_seen) {
          used = used + 1 == Ring ? 0 : used + 1;
          arrived_but<Ring - 2>();
          if (b == last_block && at_slot == slot / kSomeTerms * kSomeTerms && parity == slot % 2 && four < width)
            *(Quad*)(stage + slot % kSomeTerms * (int)kBlock + four) = *(const Quad*)(it.newest + kOneWidth + four);
        }
        half_barrier(half);
        if (!is_seen) continue;
        send();
        const float *here = weights + at_slot, *mine = here + of_head * (int)kBlock;
        if (at_slot >= begin && at_slot + kSomeTerms <= end) {
#pragma unroll
          for (int i = 0; i < kSomeTerms; i += 4) {
            const Quad some = *(const Quad*)(mine + i);
#pragma unroll
            for (int j = 0; j < 4; ++j) l_block = PlainSum::step(some.values[j], l_block);
          }
          if (two < width) multiply<G>(stage + two, here, kSomeTerms, fresh);
          continue;
        }
        const int32_t from = begin > at_slot ? begin - at_slot : 0, left = end - at_slot;
        const int32_t to = left < kSomeTerms ? left : kSomeTerms;
#pragma unroll 4
        for (int32_t i = from; i < to; ++i) {
          l_block = PlainSum::step(mine[i], l_block);
          if (two >= width) continue;
          const Two term = *(const Two*)(stage + i * (int)kBlock + two);
#pragma unroll
          for (int g = 0; g < G; ++g)
#pragma unroll
            for (int q = 0; q < 2; ++q) fresh[g][q] = f_fma(here[g * (int)kBlock + i], term.values[q], fresh[g][q]);
        }
      }
      half_barrier(half);  // weights are read
      if (half == 1 && is_there) {
#pragma unroll
        for (int g = 0; g < G; ++g) {
          *(Two*)(weights + g * (int)kBlock + two) = {{fresh[g][0], fresh[g][1]}};
          if (own == g) {
            ends[g] = m_block[g];
            ends[G + g] = l_block;
          }
        }
      }
      VOX_BARRIER();
      if (half == 0) {
        // Blocks in their order: this half's, then the other's.
#pragma unroll
        for (int other = 0; other < 2; ++other) {
          if (first + other > last_block) continue;
#pragma unroll
          for (int g = 0; g < G; ++g) {
            float m_fresh = m_block[g], l_fresh = l_block;
            Two o_fresh = {{fresh[g][0], fresh[g][1]}};
            if (other == 1) {
              m_fresh = ends[g];
              l_fresh = ends[G + g];
              o_fresh = *(const Two*)(weights + (G + g) * (int)kBlock + two);
            }
            const bool is_first = first == first_block && other == 0;
            const Shares shares = shares_of(is_first ? m_fresh : m[g], m_fresh);
#pragma unroll
            for (int q = 0; q < 2; ++q)
              o[g][q] = is_first ? o_fresh.values[q]
                                 : block_folded(o[g][q], shares.old_share, o_fresh.values[q], shares.new_share);
            if (of_head == g) l = is_first ? l_fresh : block_folded(l, shares.old_share, l_fresh, shares.new_share);
            m[g] = shares.m;
          }
        }
      }
      VOX_BARRIER();
    }
    if (half == 0) {
#pragma unroll
      for (int g = 0; g < G; ++g) {
        *(Two*)(it.weights + g * (int)kBlock + two) = {{o[g][0], o[g][1]}};
        if (own == g) ends[g] = l;
      }
    }
    VOX_BARRIER();
    float y[G], sums[G];
#pragma unroll
    for (int g = 0; g < G; ++g) {
      y[g] = it.weights[g * (int)kBlock + c];
      sums[g] = ends[g];
    }
    const AttendFew end = {at, of_heads, row, head, 0, 0, in.keys, in.values};
    AttendFew::write<G>(end, y, sums);
  }
};

}  // namespace VOX_ISA
}  // namespace vox

#define VOX_STEP_SOME_ROWS(G, Ring, at_once)                                                                               \
  VOX_ASKS(vox_step_some_rows_##G##_##Ring, kSomeRingQuads##Ring)                                                          \
  VOX_KERNEL_AT_ONCE(at_once, vox_step_some_rows_##G##_##Ring)(                                                            \
      VOX_IN(float, q, 0), VOX_IN(float, k, 1), VOX_IN(float, v, 2), VOX_IN(float, q_norm, 3), VOX_IN(float, k_norm, 4),   \
      VOX_IN(float, table, 5), VOX_IN(int32_t, slots, 6), VOX_IN(int32_t, positions, 7), VOX_IN(int32_t, sequences, 8),    \
      VOX_IN(int32_t, block_tables, 9), VOX_OUT(float, keys, 10), VOX_OUT(float, values, 11), VOX_OUT(float, out, 12),     \
      VOX_OUT(int8_t, codes, 13), VOX_OUT(float, scales, 14), VOX_OUT(int32_t, faults, 15),                                \
      VOX_OUT(int32_t, q_norm_faults, 16), VOX_OUT(int32_t, q_rope_faults, 17), VOX_OUT(int32_t, k_norm_faults, 18),       \
      VOX_OUT(int32_t, k_rope_faults, 19), VOX_ARGS(OneRowArgs, 20)) {                                                     \
    VOX_ASKED(kSomeRingQuads##Ring, ring);                                                                                 \
    VOX_SHARED Quad query[kFewQuads##G];                                                                                   \
    VOX_SHARED Quad room[kSomeRoomQuads##G];                                                                               \
    VOX_SHARED Quad newest[kSomeNewQuads];                                                                                 \
    VOX_SHARED Quad sums[kSomeSumQuads];                                                                                   \
    const AttendArgs of_heads = {args.heads,  args.kv_heads,  args.head_dim, args.value_stride, args.blocks_per_sequence,  \
                                 args.window, args.codes_out, 1,             args.scale,        args.softcap};             \
    float *weights = (float*)(Quad*)room, *of_sums = (float*)(Quad*)sums;                                                  \
    const Attend at = {q,   keys,  values, positions, sequences, block_tables, nullptr, nullptr,                           \
                       out, codes, scales, faults,    nullptr,   weights,      of_sums, nullptr};                          \
    const SomeRows it = {{q, k, v, q_norm, k_norm, table, slots, positions, sequences, block_tables, keys, values,         \
                          q_norm_faults, q_rope_faults, k_norm_faults, k_rope_faults, (float*)(Quad*)query, nullptr,       \
                          of_sums, nullptr, nullptr, nullptr},                                                             \
                         weights,                                                                                          \
                         (float*)(Quad*)newest,                                                                            \
                         weights,                                                                                          \
                         (float*)(Quad*)ring};                                                                             \
    SomeRows::run<G, Ring>(it, at, args, of_heads);                                                                        \
  }
VOX_STEP_SOME_ROWS(1, 3, 4)
VOX_STEP_SOME_ROWS(2, 3, 4)
VOX_STEP_SOME_ROWS(4, 3, 4)
VOX_STEP_SOME_ROWS(1, 6, 2)
VOX_STEP_SOME_ROWS(2, 6, 2)
VOX_STEP_SOME_ROWS(4, 6, 2)
#undef VOX_STEP_SOME_ROWS
