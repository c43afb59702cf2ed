// Gradients of attention: docs/numerics.md, attention_backward.
//
// Every sequence has its rows at the positions 0, 1, ...: keys and values are taken from the cache to rows
// [row][kv_heads * head_dim] once, and turned where threads have rows of them. An item is up to kSide
// rows of one sequence, in one block: {its first row, how many, the sequence's first row, its end}.
// P and dS of a pair are made twice, by the group of its query and by that of its key, so that each
// output has one writer and nothing of the size of all pairs is kept.
#pragma once
#include "../definitions_backward.h"
#include "attention.h"
#include "float_weights.h"

namespace vox {
namespace VOX_ISA {

struct SideSums {
  float v[kSide];
};

// C128 of each row of `rows` with one column of [term][stride]. Beyond `count` the last row stands in.
CANON SideSums side_dots(VOX_DEVICE const float* rows, int64_t row_stride, int32_t count,
                         VOX_DEVICE const float* column, int64_t stride, int32_t terms) {
  SideSums y;
  for (int i = 0; i < kSide; ++i) y.v[i] = 0.0f;
  for (int32_t first = 0; first < terms; first += (int32_t)kChunk) {
    const int32_t end = first + (int32_t)kChunk < terms ? first + (int32_t)kChunk : terms;
    SideSums p;
    for (int i = 0; i < kSide; ++i) p.v[i] = 0.0f;
    for (int32_t c = first; c < end; ++c) {
      const float x = column[c * stride];
      for (int i = 0; i < kSide; ++i) p.v[i] = f_fma(rows[(i < count ? i : count - 1) * row_stride + c], x, p.v[i]);
    }
    for (int i = 0; i < kSide; ++i) y.v[i] = chunk_folded(first == 0, y.v[i], p.v[i]);
  }
  return y;
}

// What an item's rows see of one block: [low, high), empty where they are equal, as of rows beyond the item's.
struct Spans {
  int32_t low[kSide], high[kSide];
};

// A part of each row: a chain over its span, of weights [position][kSide] by one channel of vectors
// [position][stride]. Pairs outside a span take no part.
CANON SideSums side_chains(VOX_SHARED_POINTER const float* weights, Spans spans, VOX_DEVICE const float* vectors,
                           int64_t stride) {
  int32_t lowest = (int32_t)kBlock, highest = 0, common_low = 0, common_high = (int32_t)kBlock;
  SideSums p;
  for (int i = 0; i < kSide; ++i) {
    p.v[i] = 0.0f;
    common_low = spans.low[i] > common_low ? spans.low[i] : common_low;
    common_high = spans.high[i] < common_high ? spans.high[i] : common_high;
    if (spans.low[i] == spans.high[i]) continue;
    lowest = spans.low[i] < lowest ? spans.low[i] : lowest;
    highest = spans.high[i] > highest ? spans.high[i] : highest;
  }
  for (int32_t j = lowest; j < highest; ++j) {
    const float x = vectors[j * stride];
    if (j >= common_low && j < common_high) {
      for (int i = 0; i < kSide; ++i) p.v[i] = f_fma(weights[j * kSide + i], x, p.v[i]);
    } else {
      for (int i = 0; i < kSide; ++i)
        if (j >= spans.low[i] && j < spans.high[i]) p.v[i] = f_fma(weights[j * kSide + i], x, p.v[i]);
    }
  }
  return p;
}

// The first position that a query sees, and the last one that sees a key.
CANON int32_t first_seen(int32_t query, int32_t window) {
  return window > 0 && query >= window ? query - window + 1 : 0;
}
CANON int32_t last_seeing(int32_t key, int32_t window, int32_t length) {
  return window > 0 && window < length - key ? key + window - 1 : length - 1;
}
// Positions [low, high) as a span of the block that starts at `start`.
CANON int32_t span_low(int32_t low, int32_t start) { return low > start ? low - start : 0; }
CANON int32_t span_high(int32_t high, int32_t start) {
  return high - start < (int32_t)kBlock ? high - start : (int32_t)kBlock;
}
CANON Spans one_more(Spans spans, int i, int32_t low, int32_t high) {
  spans.low[i] = low < high ? low : 0;
  spans.high[i] = low < high ? high : 0;
  return spans;
}

}  // namespace VOX_ISA
}  // namespace vox

// The inverse of vox_kv_append; bits move, and nothing is flushed.
VOX_KERNEL(vox_kv_take)(VOX_IN(uint32_t, keys, 0), VOX_IN(uint32_t, values, 1), VOX_IN(int32_t, positions, 2),
                        VOX_IN(int32_t, sequences, 3), VOX_IN(int32_t, block_tables, 4), VOX_OUT(uint32_t, k, 5),
                        VOX_OUT(uint32_t, v, 6), VOX_ARGS(KvAppendArgs, 7)) {
  if (VOX_THREAD_X >= (int64_t)args.kv_heads * args.head_dim) return;
  const int64_t head = VOX_THREAD_X / args.head_dim, c = VOX_THREAD_X % args.head_dim;
  const int32_t position = positions[VOX_THREAD_Y], slot = position % (int32_t)kBlock;
  const int64_t table = (int64_t)sequences[VOX_THREAD_Y] * args.blocks_per_sequence;
  const int64_t cache = (int64_t)block_tables[table + position / (int32_t)kBlock] * args.kv_heads + head;
  const int64_t to = VOX_THREAD_Y * args.kv_heads * args.head_dim + VOX_THREAD_X;
  k[to] = keys[(cache * args.head_dim + c) * kBlock + slot];
  v[to] = values[(cache * kBlock + slot) * args.value_stride + c];
}

// [rows][width] to [width][rows].
VOX_KERNEL(vox_turn)(VOX_IN(uint32_t, x, 0), VOX_OUT(uint32_t, out, 1), VOX_ARGS(TurnArgs, 2)) {
  if (VOX_THREAD_X >= args.rows) return;
  out[VOX_THREAD_Y * args.rows + VOX_THREAD_X] = x[VOX_THREAD_X * args.width + VOX_THREAD_Y];
}

// delta of each row and head: C128 of dy with the forward's result.
VOX_KERNEL(vox_attention_deltas)(VOX_IN(float, dy, 0), VOX_IN(float, result, 1), VOX_OUT(float, out, 2),
                                 VOX_ARGS(AttentionBackwardArgs, 3)) {
  if (VOX_THREAD_X >= (int64_t)args.rows * args.heads) return;
  const int64_t at = VOX_THREAD_X * args.head_dim;
  out[VOX_THREAD_X] = dot_of<F32>(dy + at, result + at, args.head_dim);
}

// dq. Thread j has key j of a block while dS is made, and channels j, j + kGroup, ... while it is summed.
VOX_KERNEL(vox_attention_backward_queries)(VOX_IN(float, dy, 0), VOX_IN(float, q, 1), VOX_IN(float, m, 2),
                                           VOX_IN(float, l, 3), VOX_IN(float, deltas, 4), VOX_IN(float, k, 5),
                                           VOX_IN(float, turned_k, 6), VOX_IN(float, turned_v, 7),
                                           VOX_IN(int32_t, items, 8), VOX_OUT(float, dq, 9),
                                           VOX_OUT(int32_t, faults, 10), VOX_ARGS(AttentionBackwardArgs, 11)) {
  VOX_SHARED float slopes[kSideBlock];
  const int32_t first = items[VOX_GROUP_Y * 4], count = items[VOX_GROUP_Y * 4 + 1], begin = items[VOX_GROUP_Y * 4 + 2];
  const int64_t wide = (int64_t)args.heads * args.head_dim, narrow = (int64_t)args.kv_heads * args.head_dim;
  const int64_t kv_channel = VOX_GROUP_X / (args.heads / args.kv_heads) * args.head_dim;
  const int64_t rows = first * wide + VOX_GROUP_X * args.head_dim;
  const int32_t position = first - begin, lowest = first_seen(position, args.window);
  const int32_t first_block = lowest / (int32_t)kBlock;
  for (int32_t b = first_block; b <= position / (int32_t)kBlock; ++b) {
    const int32_t start = b * (int32_t)kBlock, key = start + VOX_LOCAL;
    VOX_BARRIER();  // the last block's slopes are read
    if (key >= lowest && key < position + count) {
      const int64_t turned = kv_channel * args.rows + begin + key;
      const SideSums qk = side_dots(q + rows, wide, count, turned_k + turned, args.rows, args.head_dim);
      const SideSums dyv = side_dots(dy + rows, wide, count, turned_v + turned, args.rows, args.head_dim);
      for (int i = 0; i < kSide; ++i) {
        if (i >= count || key > position + i || key < first_seen(position + i, args.window)) continue;
        const int64_t at = (int64_t)(first + i) * args.heads + VOX_GROUP_X;
        slopes[VOX_LOCAL * kSide + i] = pair_gradients(qk.v[i], dyv.v[i], args.scale, args.softcap != 0.0f,
                                                       args.softcap, m[at], l[at], deltas[at]).score;
      }
    }
    VOX_BARRIER();
    Spans spans;
    for (int i = 0; i < kSide; ++i) {
      const int32_t query = position + i, low = span_low(first_seen(query, args.window), start);
      spans = one_more(spans, i, low, i < count ? span_high(query + 1, start) : 0);
    }
    for (int32_t c = VOX_LOCAL; c < args.head_dim; c += kGroup) {
      const SideSums part = side_chains(slopes, spans, k + (begin + start) * narrow + kv_channel + c, narrow);
      for (int i = 0; i < kSide; ++i) {
        if (spans.low[i] == spans.high[i]) continue;
        const int64_t at = rows + i * wide + c;
        const bool is_first = b == first_seen(position + i, args.window) / (int32_t)kBlock;
        dq[at] = chunk_folded(is_first, is_first ? 0.0f : dq[at], part.v[i]);
      }
    }
  }
  for (int32_t c = VOX_LOCAL; c < args.head_dim; c += kGroup)
    for (int32_t i = 0; i < count; ++i) {
      const float y = f_mul(dq[rows + i * wide + c], args.scale);
      dq[rows + i * wide + c] = y;
      VOX_WATCH(y, first + i);
    }
}

// dk and dv: the same with queries and keys exchanged, over every query head of the group.
VOX_KERNEL(vox_attention_backward_keys)(VOX_IN(float, dy, 0), VOX_IN(float, q, 1), VOX_IN(float, m, 2),
                                        VOX_IN(float, l, 3), VOX_IN(float, deltas, 4), VOX_IN(float, k, 5),
                                        VOX_IN(float, v, 6), VOX_IN(float, turned_q, 7), VOX_IN(float, turned_dy, 8),
                                        VOX_IN(int32_t, items, 9), VOX_OUT(float, dk, 10), VOX_OUT(float, dv, 11),
                                        VOX_OUT(int32_t, faults, 12), VOX_ARGS(AttentionBackwardArgs, 13)) {
  VOX_SHARED float shares[kSideBlock];
  VOX_SHARED float slopes[kSideBlock];
  const int32_t first = items[VOX_GROUP_Y * 4], count = items[VOX_GROUP_Y * 4 + 1], begin = items[VOX_GROUP_Y * 4 + 2];
  const int32_t length = items[VOX_GROUP_Y * 4 + 3] - begin;
  const int64_t wide = (int64_t)args.heads * args.head_dim, narrow = (int64_t)args.kv_heads * args.head_dim;
  const int32_t group = args.heads / args.kv_heads;
  const int64_t rows = first * narrow + VOX_GROUP_X * args.head_dim;
  const int32_t position = first - begin, first_block = position / (int32_t)kBlock;
  const int32_t last = last_seeing(position + count - 1, args.window, length);
  for (int32_t h = 0; h < group; ++h) {
    const int64_t head = VOX_GROUP_X * group + h, channel = head * args.head_dim;
    for (int32_t b = first_block; b <= last / (int32_t)kBlock; ++b) {
      const int32_t start = b * (int32_t)kBlock, query = start + VOX_LOCAL;
      VOX_BARRIER();  // the last block's are read
      if (query >= position && query <= last) {
        const int64_t turned = channel * args.rows + begin + query, at = (int64_t)(begin + query) * args.heads + head;
        const SideSums qk = side_dots(k + rows, narrow, count, turned_q + turned, args.rows, args.head_dim);
        const SideSums dyv = side_dots(v + rows, narrow, count, turned_dy + turned, args.rows, args.head_dim);
        for (int i = 0; i < kSide; ++i) {
          if (i >= count || query < position + i || query > last_seeing(position + i, args.window, length)) continue;
          const PairGradients<float> pair = pair_gradients(qk.v[i], dyv.v[i], args.scale, args.softcap != 0.0f,
                                                           args.softcap, m[at], l[at], deltas[at]);
          shares[VOX_LOCAL * kSide + i] = pair.probability;
          slopes[VOX_LOCAL * kSide + i] = pair.score;
        }
      }
      VOX_BARRIER();
      Spans spans;
      for (int i = 0; i < kSide; ++i) {
        const int32_t key = position + i, last_query = last_seeing(key, args.window, length);
        spans = one_more(spans, i, span_low(key, start), i < count ? span_high(last_query + 1, start) : 0);
      }
      for (int32_t c = VOX_LOCAL; c < args.head_dim; c += kGroup) {
        const int64_t vector = (begin + start) * wide + channel + c;
        const SideSums for_v = side_chains(shares, spans, dy + vector, wide);
        const SideSums for_k = side_chains(slopes, spans, q + vector, wide);
        const bool is_first = h == 0 && b == first_block;
        for (int i = 0; i < kSide; ++i) {
          if (spans.low[i] == spans.high[i]) continue;
          const int64_t at = rows + i * narrow + c;
          dv[at] = chunk_folded(is_first, is_first ? 0.0f : dv[at], for_v.v[i]);
          dk[at] = chunk_folded(is_first, is_first ? 0.0f : dk[at], for_k.v[i]);
        }
      }
    }
  }
  for (int32_t c = VOX_LOCAL; c < args.head_dim; c += kGroup)
    for (int32_t i = 0; i < count; ++i) {
      const int64_t at = rows + i * narrow + c;
      const float y = f_mul(dk[at], args.scale);
      dk[at] = y;
      VOX_WATCH(y, first + i);
      VOX_WATCH(dv[at], first + i);
    }
}
