// KV blocks and attention over them: docs/numerics.md, attention.
//
// Keys [block][kv_heads][head_dim][128], transposed, so that neighbouring threads read neighbouring
// positions; values [block][kv_heads][128][value_stride], so that they read neighbouring channels.
#pragma once
#include "elementwise.h"
#include "group.h"

namespace vox {
namespace VOX_ISA {

// C128 over head_dim of one query with the key of one slot.
CANON float score_of(VOX_DEVICE const float* query, VOX_DEVICE const float* key, int32_t head_dim) {
  float y = 0.0f;
  for (int32_t first = 0; first < head_dim; first += (int32_t)kChunk) {
    const int32_t end = first + (int32_t)kChunk < head_dim ? first + (int32_t)kChunk : head_dim;
    float p = 0.0f;
    for (int32_t c = first; c < end; ++c) p = f_fma(query[c], key[(int64_t)c * kBlock], p);
    y = chunk_folded(first == 0, y, p);
  }
  return y;
}

// m and l after the last block.
struct RowEnds {
  float m, l;
};

// A group is one query head of one row. Thread j has slot j of a block while scores are made, and
// channels j, j + kGroup, ... while values are summed; `out` holds o until the end.
CANON RowEnds attended(VOX_DEVICE const float* query, VOX_DEVICE const float* keys, VOX_DEVICE const float* values,
                       VOX_DEVICE const int32_t* blocks, int32_t last, int64_t kv_head, AttentionArgs args,
                       VOX_SHARED_POINTER float* weights, int32_t local, VOX_DEVICE float* out,
                       VOX_DEVICE int32_t* faults, int64_t row) {
  const int32_t low = args.window > 0 && last >= args.window ? last - args.window + 1 : 0;
  const int32_t first_block = low / (int32_t)kBlock;
  float m = 0.0f, l = 0.0f;
  for (int32_t b = first_block; b <= last / (int32_t)kBlock; ++b) {
    const int32_t start = b * (int32_t)kBlock;
    const int32_t begin = low > start ? low - start : 0;
    const int32_t end = last - start < (int32_t)kBlock ? last - start + 1 : (int32_t)kBlock;
    const int64_t cache = (int64_t)blocks[b] * args.kv_heads + kv_head;
    VOX_BARRIER();  // the last block's weights are read
    if (local >= begin && local < end) {
      float s = score_of(query, keys + cache * args.head_dim * kBlock + local, args.head_dim);
      s = f_mul(s, args.scale);
      if (args.softcap != 0.0f) s = f_softcap(s, args.softcap);
      weights[local] = s;
    }
    VOX_BARRIER();
    float m_block = weights[begin];
    for (int32_t j = begin + 1; j < end; ++j) m_block = f_max(m_block, weights[j]);
    m_block = f_add(m_block, 0.0f);  // -0 counts as +0
    VOX_BARRIER();  // the scores are read; each becomes its weight
    if (local >= begin && local < end) weights[local] = f_exp(f_sub(weights[local], m_block));
    VOX_BARRIER();
    float l_block = 0.0f;
    for (int32_t j = begin; j < end; ++j) l_block = PlainSum::step(weights[j], l_block);
    const bool is_first = b == first_block;
    const Shares shares = shares_of(is_first ? m_block : m, m_block);
    for (int32_t c = local; c < args.head_dim; c += kGroup) {
      VOX_DEVICE const float* value = values + cache * kBlock * args.value_stride + c;
      float o_block = 0.0f;
      for (int32_t j = begin; j < end; ++j) o_block = f_fma(weights[j], value[(int64_t)j * args.value_stride], o_block);
      const float old = is_first ? 0.0f : out[c];
      out[c] = is_first ? o_block : block_folded(old, shares.old_share, o_block, shares.new_share);
    }
    l = is_first ? l_block : block_folded(l, shares.old_share, l_block, shares.new_share);
    m = shares.m;
  }
  for (int32_t c = local; c < args.head_dim; c += kGroup) {
    const float y = f_div(out[c], l);
    out[c] = y;
    VOX_WATCH(y, row);
  }
  return {m, l};
}

}  // namespace VOX_ISA
}  // namespace vox

VOX_KERNEL(vox_kv_append)(VOX_IN(uint32_t, k, 0), VOX_IN(uint32_t, v, 1), VOX_IN(int32_t, positions, 2),
                          VOX_IN(int32_t, sequences, 3), VOX_IN(int32_t, block_tables, 4), VOX_OUT(uint32_t, keys, 5),
                          VOX_OUT(uint32_t, values, 6), VOX_ARGS(KvAppendArgs, 7)) {
  if (VOX_THREAD_X >= (int64_t)args.kv_heads * args.head_dim) return;
  const int64_t head = VOX_THREAD_X / args.head_dim, c = VOX_THREAD_X % args.head_dim;
  const int32_t position = positions[VOX_THREAD_Y], slot = position % (int32_t)kBlock;
  const int64_t table = (int64_t)sequences[VOX_THREAD_Y] * args.blocks_per_sequence;
  const int64_t cache = (int64_t)block_tables[table + position / (int32_t)kBlock] * args.kv_heads + head;
  const int64_t from = VOX_THREAD_Y * args.kv_heads * args.head_dim + VOX_THREAD_X;
  keys[(cache * args.head_dim + c) * kBlock + slot] = k[from];
  values[(cache * kBlock + slot) * args.value_stride + c] = v[from];
}

VOX_KERNEL(vox_attention)(VOX_IN(float, q, 0), VOX_IN(float, keys, 1), VOX_IN(float, values, 2),
                          VOX_IN(int32_t, positions, 3), VOX_IN(int32_t, sequences, 4),
                          VOX_IN(int32_t, block_tables, 5), VOX_OUT(float, out, 6), VOX_OUT(int32_t, faults, 7),
                          VOX_ARGS(AttentionArgs, 8)) {
  VOX_SHARED float weights[kBlock];
  const int64_t query = (VOX_GROUP_Y * args.heads + VOX_GROUP_X) * args.head_dim;
  attended(q + query, keys, values, block_tables + (int64_t)sequences[VOX_GROUP_Y] * args.blocks_per_sequence,
           positions[VOX_GROUP_Y], VOX_GROUP_X / (args.heads / args.kv_heads), args, weights, VOX_LOCAL, out + query,
           faults, VOX_GROUP_Y);
}

// The same, keeping m and l [rows][heads] for its backward.
VOX_KERNEL(vox_attention_saving)(VOX_IN(float, q, 0), VOX_IN(float, keys, 1), VOX_IN(float, values, 2),
                                 VOX_IN(int32_t, positions, 3), VOX_IN(int32_t, sequences, 4),
                                 VOX_IN(int32_t, block_tables, 5), VOX_OUT(float, saved_m, 6),
                                 VOX_OUT(float, saved_l, 7), VOX_OUT(float, out, 8), VOX_OUT(int32_t, faults, 9),
                                 VOX_ARGS(AttentionArgs, 10)) {
  VOX_SHARED float weights[kBlock];
  const int64_t head = VOX_GROUP_Y * args.heads + VOX_GROUP_X, query = head * args.head_dim;
  const RowEnds ends =
      attended(q + query, keys, values, block_tables + (int64_t)sequences[VOX_GROUP_Y] * args.blocks_per_sequence,
               positions[VOX_GROUP_Y], VOX_GROUP_X / (args.heads / args.kv_heads), args, weights, VOX_LOCAL,
               out + query, faults, VOX_GROUP_Y);
  if (VOX_LOCAL != 0) return;
  saved_m[head] = ends.m;
  saved_l[head] = ends.l;
}
