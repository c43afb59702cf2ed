// Attention of one row over few KV blocks, with what stands before it: heads are normed, rotated and stored by the
// groups that attend. A group has one query head and one KV block, whose keys and values it asks for before its
// inputs are there; the code is short, since each launch finds it anew. The groups of a head are a cluster where the
// GPU has those: what they made goes from shared memory to shared memory. Elsewhere it goes through memory, and the
// last to finish folds it.

namespace vox {
namespace VOX_ISA {

enum {
  kOneWidth = 128,  // channels of a head, at most
  kOneQuads = kOneWidth / 4,
  kOneTile = kOneWidth * (int)kBlock,        // floats of a block's keys, or values
  kOneTilesQuads = 2 * kOneTile / 4,
  kOnePart = kOneWidth + 2,
  kOneSums = 2,
  kTogether = 32,  // terms of a chain that are read before they are used
};

struct OneRowArgs {  // group (query head, KV block of the row's), row
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t value_stride;
  int32_t blocks_per_sequence;
  int32_t window;
  int32_t codes_out;
  float eps;
  float scale;
  float softcap;
};

struct NextArgs {  // thread (integer)
  int32_t count;
  int32_t rows;
  int32_t position_at;
  int32_t token_at;
};

struct OneRow {
  const float *q, *k, *v, *q_norm, *k_norm, *table;
  const int32_t *slots, *positions, *sequences, *block_tables;
  float *keys, *values;
  int32_t *q_norm_faults, *q_rope_faults, *k_norm_faults, *k_rope_faults;
  float *query, *key, *sums, *part;  // in shared memory; the first two aligned as Quad
  float *key_tile, *value_tile;      // [channels][kBlock], [kBlock][value_stride]
};

// Groups of a cluster: a head's.
CANON int32_t in_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t count;
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(count));
  return (int32_t)count;
#else
  return 1;
#endif
}
// Say that this group came so far; wait until all of the cluster did, and see what they wrote before.
CANON void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
CANON void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}
// What another group of the cluster has at this place of its shared memory.
CANON float of_group(const float* mine, int32_t group) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  uint32_t there;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"((uint32_t)__cvta_generic_to_shared(mine)), "r"(group));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
  return value;
#else
  return *mine;
#endif
}

CANON void attend_one(const Attend& at, const OneRow& in, const OneRowArgs& args, const AttendArgs& of_heads) {
  const int64_t row = VOX_GROUP_Y;
  const int32_t blocks = args.blocks_per_sequence, sharing = args.heads / args.kv_heads;
  const int32_t head = (int32_t)VOX_GROUP_X / blocks, index = (int32_t)VOX_GROUP_X % blocks, kv_head = head / sharing;
  const int32_t last = in.positions[row];
  const int32_t low = args.window > 0 && last >= args.window ? last - args.window + 1 : 0;
  const int32_t first_block = low / (int32_t)kBlock, b = first_block + index;
  const int32_t count = last / (int32_t)kBlock - first_block + 1;
  if (index >= count) {
    wait_for_inputs();
    return;
  }
  const int32_t width = args.head_dim, pairs = width / 2, stride = args.value_stride;
  const int32_t start = b * (int32_t)kBlock, slot = last % (int32_t)kBlock;
  const int32_t begin = low > start ? low - start : 0;
  const int32_t end = last - start < (int32_t)kBlock ? last - start + 1 : (int32_t)kBlock;
  const bool is_inside = VOX_LOCAL >= begin && VOX_LOCAL < end;
  const bool is_newest = index == count - 1;  // the block that the row itself belongs to
  const bool stores = is_newest && head % sharing == 0;  // the first query head that shares them
  const int64_t cache = (int64_t)in.block_tables[(int64_t)in.sequences[row] * blocks + b] * args.kv_heads + kv_head;
  float* key = in.keys + cache * width * kBlock;
  float* value = in.values + cache * kBlock * stride;
  // Other positions than the row's own were stored by earlier steps; norms and angles are no one's output.
  const int32_t four = VOX_LOCAL % 32 * 4, warp = VOX_LOCAL / 32;
  if (four + 4 > begin && four < end) {
#pragma unroll 4
    for (int32_t c = warp; c < width; c += 4) sent(in.key_tile + c * (int32_t)kBlock + four, key + c * (int32_t)kBlock + four);
  }
  if (four < width) {
#pragma unroll 4
    for (int32_t j = begin + warp; j < end; j += 4) sent(in.value_tile + j * stride + four, value + j * stride + four);
  }
  const int64_t angles = ((int64_t)in.slots[last / (int32_t)kBlock] * kBlock + slot) * width;
  const int32_t c = VOX_LOCAL < width ? VOX_LOCAL : 0, pair = c < pairs ? c : c - pairs;
  const float* weight = c < pairs ? in.q_norm : in.k_norm;
  const float one_weight = early(weight + pair), other_weight = early(weight + pair + pairs);
  const float cosine = early(in.table + angles + pair), sine = early(in.table + angles + pairs + pair);
  inputs_are_there();
  const float q = early(in.q + (row * args.heads + head) * width + c);
  float k = 0.0f, v = 0.0f;
  if (is_newest) {
    k = early(in.k + (row * args.kv_heads + kv_head) * width + c);
    v = early(in.v + (row * args.kv_heads + kv_head) * width + c);
  }
  if (VOX_LOCAL < width) {
    in.query[c] = q;
    in.key[c] = k;
  }
  arrived_all();
  let_next_start();
  VOX_BARRIER();
  // The query's squares in one warp, the key's in the next.
  if (VOX_LOCAL == 0 || VOX_LOCAL == 32) {
    in.sums[VOX_LOCAL / 32] = squares_of(VOX_LOCAL == 0 ? in.query : in.key, width);
  }
  VOX_BARRIER();
  // Half of the threads take the query's pairs, the others the key's.
  if (VOX_LOCAL < width && (c < pairs || is_newest)) {
    const bool is_query = c < pairs;
    const float sum = chunk_folded(true, 0.0f, in.sums[is_query ? 0 : 1]);
    const float inverse = norm_inverse(sum, (float)width, args.eps);
    const float* raw = is_query ? in.query : in.key;
    // An infinite sum makes every output zero, and would hide: the head is NaN instead.
    const float one = is_finite(sum) ? normed(raw[pair], inverse, one_weight) : f_from(0x7FC00000);
    const float other = is_finite(sum) ? normed(raw[pair + pairs], inverse, other_weight) : f_from(0x7FC00000);
    if (!is_finite(one) || !is_finite(other)) (is_query ? in.q_norm_faults : in.k_norm_faults)[row] = 1;
    const Halves<float> y = rotated(one, other, cosine, sine);
    if (!is_finite(y.first) || !is_finite(y.second)) (is_query ? in.q_rope_faults : in.k_rope_faults)[row] = 1;
    if (is_query) {
      in.query[pair] = y.first;
      in.query[pair + pairs] = y.second;
    } else {
      in.key_tile[pair * (int32_t)kBlock + slot] = y.first;
      in.key_tile[(pair + pairs) * (int32_t)kBlock + slot] = y.second;
      if (stores) {
        key[pair * (int32_t)kBlock + slot] = y.first;
        key[(pair + pairs) * (int32_t)kBlock + slot] = y.second;
      }
    }
  }
  if (is_newest && VOX_LOCAL < width) {
    in.value_tile[slot * stride + c] = v;
    if (stores) value[slot * stride + c] = v;
  }
  VOX_BARRIER();
  float s = f_from((int32_t)0xFF800000u);
  if (is_inside) {
    float p = 0.0f;
    const float* own = in.key_tile + VOX_LOCAL;
#pragma unroll 2
    for (int32_t first = 0; first < width; first += kTogether) {
      float terms[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i)
        if (first + i < width) terms[i] = own[(first + i) * (int32_t)kBlock];
#pragma unroll
      for (int i = 0; i < kTogether; i += 4) {
        if (first + i >= width) continue;
        const Quad x = *(const Quad*)(in.query + first + i);
#pragma unroll
        for (int j = 0; j < 4; ++j) p = f_fma(x.values[j], terms[i + j], p);
      }
    }
    s = f_mul(chunk_folded(true, 0.0f, p), args.scale);
    if (args.softcap != 0.0f) s = f_softcap(s, args.softcap);
  }
  at.weights[VOX_LOCAL] = s;
  VOX_BARRIER();
  if (VOX_LOCAL < 16) {
    float most = at.weights[VOX_LOCAL];
#pragma unroll
    for (int j = 1; j < kGroup / 16; ++j) most = f_max(most, at.weights[16 * j + VOX_LOCAL]);
    at.highest[VOX_LOCAL] = most;
  }
  VOX_BARRIER();
  float m = at.highest[0];
#pragma unroll
  for (int j = 1; j < 16; ++j) m = f_max(m, at.highest[j]);
  m = f_add(m, 0.0f);  // -0 counts as +0
  if (is_inside) at.weights[VOX_LOCAL] = f_exp(f_sub(s, m));
  VOX_BARRIER();
  float l = 0.0f, o[kChannels] = {0.0f};
  const float* of_channel = in.value_tile + begin * stride + c;
  auto taken = [&](float weight, float term) {
    l = PlainSum::step(weight, l);
    o[0] = f_fma(weight, term, o[0]);
  };
  int32_t j = begin;
  for (; j < end && j % 4 != 0; ++j, of_channel += stride) taken(at.weights[j], of_channel[0]);
#pragma unroll 2
  for (; j + kTogether <= end; j += kTogether) {
    float terms[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i, of_channel += stride) terms[i] = of_channel[0];
#pragma unroll
    for (int i = 0; i < kTogether; i += 4) {
      const Quad w = *(const Quad*)(at.weights + j + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) taken(w.values[k], terms[i + k]);
    }
  }
#pragma unroll 4
  for (; j < end; ++j, of_channel += stride) taken(at.weights[j], of_channel[0]);
  if (count > 1 && in_cluster() > 1) {  // all blocks are in it
    if (index != 0) {
      if (VOX_LOCAL < width) in.part[c] = o[0];
      if (VOX_LOCAL == 0) {
        in.part[kOneWidth] = m;
        in.part[kOneWidth + 1] = l;
      }
    }
    cluster_arrive();
    cluster_wait();
    if (index == 0) {
      for (int32_t other = 1; other < count; ++other) {
        const float m_block = of_group(in.part + kOneWidth, other), l_block = of_group(in.part + kOneWidth + 1, other);
        const float o_block = of_group(in.part + c, other);
        const Shares shares = shares_of(m, m_block);
        o[0] = block_folded(o[0], shares.old_share, o_block, shares.new_share);
        l = block_folded(l, shares.old_share, l_block, shares.new_share);
        m = shares.m;
      }
    }
    cluster_arrive();
    if (index != 0) {
      cluster_wait();  // nobody's memory goes before it was read
      return;
    }
  } else if (count > 1) {
    const int64_t part = (int64_t)width + 2;
    float* parts = at.parts + (row * args.heads + head) * blocks * part;
    float* mine = parts + index * part;
    if (VOX_LOCAL < width) mine[c] = o[0];
    if (VOX_LOCAL == 0) {
      mine[width] = m;
      mine[width + 1] = l;
    }
    see_all();
    VOX_BARRIER();
    if (VOX_LOCAL == 0) at.magnitudes[0] = arrived(at.counters + row * args.heads + head);
    VOX_BARRIER();
    if (at.magnitudes[0] != count - 1) return;
    if (VOX_LOCAL == 0) at.counters[row * args.heads + head] = 0;
    see_all();
    VOX_BARRIER();  // before anything else stands where the number was
    for (int32_t other = 0; other < count; ++other) {
      const bool is_first = other == 0;
      const float m_block = early(parts + other * part + width), l_block = early(parts + other * part + width + 1);
      const float o_block = early(parts + other * part + c);
      const Shares shares = shares_of(is_first ? m_block : m, m_block);
      o[0] = is_first ? o_block : block_folded(o[0], shares.old_share, o_block, shares.new_share);
      l = is_first ? l_block : block_folded(l, shares.old_share, l_block, shares.new_share);
      m = shares.m;
    }
  }
  attended(at, of_heads, head, o, l);
}

}  // namespace VOX_ISA
}  // namespace vox

VOX_ASKS_AT_MOST(vox_step_one_row, kOneTilesQuads)
VOX_KERNEL(vox_step_one_row)(VOX_IN(float, q, 0), VOX_IN(float, k, 1), VOX_IN(float, v, 2), VOX_IN(float, q_norm, 3),
                             VOX_IN(float, k_norm, 4), VOX_IN(float, table, 5), VOX_IN(int32_t, slots, 6),
                             VOX_IN(int32_t, positions, 7), VOX_IN(int32_t, sequences, 8),
                             VOX_IN(int32_t, block_tables, 9), VOX_OUT(float, keys, 10), VOX_OUT(float, values, 11),
                             VOX_OUT(float, parts, 12), VOX_OUT(int32_t, counters, 13), VOX_OUT(float, out, 14),
                             VOX_OUT(int8_t, codes, 15), VOX_OUT(float, scales, 16), VOX_OUT(int32_t, faults, 17),
                             VOX_OUT(int32_t, q_norm_faults, 18), VOX_OUT(int32_t, q_rope_faults, 19),
                             VOX_OUT(int32_t, k_norm_faults, 20), VOX_OUT(int32_t, k_rope_faults, 21),
                             VOX_ARGS(OneRowArgs, 22)) {
  VOX_ASKED(kOneTilesQuads, tiles);
  VOX_SHARED Quad query[kOneQuads];
  VOX_SHARED Quad key[kOneQuads];
  VOX_SHARED Quad weights[kWeightQuads1];
  VOX_SHARED float part[kOnePart];
  VOX_SHARED float sums[kOneSums];
  VOX_SHARED float highest[kHighest1];
  VOX_SHARED int32_t magnitudes[kGroup];
  float* key_tile = (float*)(Quad*)tiles;
  const AttendArgs of_heads = {args.heads,  args.kv_heads,  args.head_dim, args.value_stride, args.blocks_per_sequence,
                               args.window, args.codes_out, 1,             args.scale,        args.softcap};
  const OneRow in = {q, k, v, q_norm, k_norm, table, slots, positions, sequences, block_tables, keys, values,
                     q_norm_faults, q_rope_faults, k_norm_faults, k_rope_faults, (float*)(Quad*)query,
                     (float*)(Quad*)key, sums, part, key_tile, key_tile + args.head_dim * (int32_t)kBlock};
  const Attend at = {q, keys, values, positions, sequences, block_tables, parts, counters, out, codes, scales, faults,
                     (float*)(Quad*)query, (float*)(Quad*)weights, highest, magnitudes};
  attend_one(at, in, args, of_heads);
}

// Where the next row of each sequence is, and that its token is the highest: what the next step reads, if those are
// the tokens that are chosen.
VOX_KERNEL(vox_step_next)(VOX_IN(int32_t, places, 0), VOX_IN(int32_t, highest, 1), VOX_OUT(int32_t, next, 2),
                          VOX_ARGS(NextArgs, 3)) {
  wait_for_inputs();
  const int32_t i = (int32_t)VOX_THREAD_X;
  if (i >= args.count) return;
  const int32_t token = i - args.token_at, position = i - args.position_at;
  const bool is_token = token >= 0 && token < args.rows, is_position = position >= 0 && position < args.rows;
  next[i] = is_token ? highest[token] : places[i] + (is_position ? 1 : 0);
}
