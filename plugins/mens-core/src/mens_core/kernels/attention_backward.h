// Gradients of attention: docs/numerics.md, attention_backward.
//
// Round by round (one query head of each group, one block of 128 queries): `queries_part` makes the
// probabilities and the gradients of the scores, keeps both, and finishes dq; `keys_part` adds
// what they give to dk and dv. So every product is taken once, and each output has one writer.
#pragma once
#include "backward_tasks.h"
#include "definitions_backward.h"
#include "spans.h"
#include "transpose.h"

namespace vox {
namespace VOX_ISA {

static void copy_padded(const float* from, int64_t count, int64_t stride, float* to) {
  __builtin_memcpy(to, from, (size_t)count * sizeof(float));
  for (int64_t c = count; c < stride; ++c) to[c] = 0.0f;
}

// Keys by row and values by column, for the positions [0, item.end) of one block of one stream.
static int64_t transpose_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& backward = *static_cast<const AttentionBackwardTask*>(task);
  const KvLayer& layer = backward.layer;
  const int64_t C = layer.head_dim, stride = layer.value_stride;
  for (int64_t at = begin; at < end; ++at) {
    const BackwardItem& item = backward.items[at];
    const BackwardStream& stream = backward.streams[item.stream];
    const int32_t* table = backward.rows.block_tables + stream.sequence * backward.rows.blocks_per_sequence;
    const int64_t cache = (int64_t)table[item.block] * layer.kv_heads + stream.kv_head;
    const float* keys = layer.keys + cache * C * kBlock;
    const float* values = layer.values + cache * kBlock * stride;
    float* key_rows = stream.key_rows + item.block * kBlock * stride;
    float* value_columns = stream.value_columns + item.block * C * kBlock;
    transpose(keys, kBlock, C, item.end, key_rows, stride);
    for (int64_t j = 0; j < item.end; ++j)
      for (int64_t c = C; c < stride; ++c) key_rows[j * stride + c] = 0.0f;
    transpose(values, stride, item.end, C, value_columns, kBlock);
  }
  return 0;
}

// C128 over channels of the rows of `a` [stride] times columns [channel][128], for some panels.
static void channel_products(const float* a, int64_t stride, int64_t rows, int64_t channels, const float* columns,
                             int64_t first_panel, int64_t end_panel, float* out) {
  const F32Side side{columns, kBlock, kLanes};
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t some = rows - r < kTileRows ? rows - r : kTileRows;
    for (int64_t c = 0; c < channels; c += kChunk)
      tile_rows(some, end_panel - first_panel, RowsLeft{a + r * stride, stride}, side, first_panel, c,
                c + kChunk < channels ? c + kChunk : channels, out + r * kBlock + first_panel * kLanes, kBlock,
                Start::zero, c == 0 ? Finish::store : Finish::fold);
  }
}

struct QueryRow {
  float m, l, delta;
};

// From dot products q k and dy v of one query: probabilities and gradients of the scores, in their place.
static void score_gradients(const AttentionBackwardTask& task, const QueryRow& row, Span span, float* p, float* ds) {
  const VF scale = f_splat(task.scale), cap = f_splat(task.softcap);
  const VF m = f_splat(row.m), l = f_splat(row.l), delta = f_splat(row.delta);
  for (int64_t j = span.low / kLanes * kLanes; j < span.high; j += kLanes) {
    const PairGradients<VF> pairs =
        pair_gradients(f_load(p + j), f_load(ds + j), scale, task.softcap != 0.0f, cap, m, l, delta);
    f_store(p + j, pairs.probability);
    f_store(ds + j, pairs.score);
  }
}

// y = part, or y + part, for `count` channels.
static void fold_row(float* y, const float* part, int64_t count, bool is_first) {
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes)
    f_store(y + c, is_first ? f_load(part + c) : f_add(f_load(y + c), f_load(part + c)));
  for (; c < count; ++c) y[c] = is_first ? part[c] : f_add(y[c], part[c]);
}

// to = y * scale, for `count` channels; whether all are finite.
static bool scale_row(const float* y, float scale, int64_t count, float* to) {
  const VF all = f_splat(scale);
  FiniteWatch watch;
  int64_t c = 0;
  for (; c + kLanes <= count; c += kLanes) {
    const VF scaled = f_mul(f_load(y + c), all);
    watch.see(scaled);
    f_store(to + c, scaled);
  }
  bool finite = watch.saw_only_finite();
  for (; c < count; ++c) {
    to[c] = f_mul(y[c], scale);
    finite = finite && is_finite(to[c]);
  }
  return finite;
}

// C128 over channels of dy out, eight rows side by side where there are as many.
template <int Side>
static void deltas(const float* dy, int64_t dy_stride, const float* out, int64_t out_stride, int64_t channels,
                   QueryRow* rows) {
  for (int64_t c = 0; c < channels; c += kChunk) {
    const int64_t end = c + kChunk < channels ? c + kChunk : channels;
    float p[Side];
    for (int i = 0; i < Side; ++i) p[i] = 0.0f;
    for (int64_t k = c; k < end; ++k)
      for (int i = 0; i < Side; ++i) p[i] = f_fma(dy[i * dy_stride + k], out[i * out_stride + k], p[i]);
    for (int i = 0; i < Side; ++i) rows[i].delta = c == 0 ? p[i] : f_add(rows[i].delta, p[i]);
  }
}

// Queries [item.first, item.end) of the round's block; scratch holds dq and a block's part of it.
static int64_t backward_queries(const AttentionBackwardTask& task, const BackwardItem& item, float* scratch) {
  const KvLayer& layer = task.layer;
  const BackwardStream& stream = task.streams[item.stream];
  const int64_t C = layer.head_dim, stride = layer.value_stride, rows = item.end - item.first;
  const int64_t head = stream.kv_head * (task.heads / layer.kv_heads) + task.head_of_group;
  const int64_t position = task.query_block * kBlock + item.first;  // of the first row
  const int64_t row = stream.first_row + position;
  float* q = stream.q + item.first * stride;
  float* dy = stream.dy + item.first * stride;
  float* dq = scratch;
  float* part = scratch + kBackwardRows * stride;
  QueryRow queries[kBackwardRows];
  int32_t lows[kBackwardRows];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = (row + i) * task.heads + head;
    copy_padded(task.q + at * C, C, stride, q + i * stride);
    copy_padded(task.dy + at * C, C, stride, dy + i * stride);
    queries[i] = {task.m[at], task.l[at], 0.0f};
    const int64_t low = task.window > 0 ? position + i - task.window + 1 : 0;
    lows[i] = low > 0 ? (int32_t)low : 0;
  }
  const float* out = task.out + (row * task.heads + head) * C;
  int64_t i = 0;
  for (; i + 8 <= rows; i += 8)
    deltas<8>(dy + i * stride, stride, out + i * task.heads * C, task.heads * C, C, queries + i);
  for (; i < rows; ++i) deltas<1>(dy + i * stride, 0, out + i * task.heads * C, 0, C, queries + i);

  const int64_t first_tile = first_block_seen(task.query_block * kBlock, task.window);
  for (int64_t b = lows[0] / kBlock; b <= task.query_block; ++b) {
    // Later windows begin later: the rows that see something of this block are the first ones.
    Span spans[kBackwardRows];
    int64_t count = 0;
    int32_t lowest = kBlock, highest = 0;
    for (; count < rows; ++count) {
      const int64_t first = b * kBlock;
      const int64_t low = lows[count] > first ? lows[count] - first : 0;
      const int64_t high = position + count - first + 1 < kBlock ? position + count - first + 1 : kBlock;
      if (low >= high) break;
      spans[count] = {(int32_t)low, (int32_t)high};
      lowest = spans[count].low < lowest ? spans[count].low : lowest;
      highest = spans[count].high > highest ? spans[count].high : highest;
    }
    float* p = stream.tiles + (b - first_tile) * 2 * kBlock * kBlock + item.first * kBlock;
    float* ds = p + kBlock * kBlock;
    const int64_t first_panel = lowest / kLanes, end_panel = (highest + kLanes - 1) / kLanes;
    const int64_t cache = (int64_t)task.rows.block_tables[stream.sequence * task.rows.blocks_per_sequence + b] *
                              layer.kv_heads + stream.kv_head;
    channel_products(q, stride, count, C, layer.keys + cache * C * kBlock, first_panel, end_panel, p);
    channel_products(dy, stride, count, C, stream.value_columns + b * C * kBlock, first_panel, end_panel, ds);
    for (i = 0; i < count; ++i) score_gradients(task, queries[i], spans[i], p + i * kBlock, ds + i * kBlock);
    span_chains(count, spans, RowsLeft{ds, kBlock}, F32Side{stream.key_rows + b * kBlock * stride, stride, kLanes},
                stride / kLanes, part, stride);
    for (i = 0; i < count; ++i) fold_row(dq + i * stride, part + i * stride, stride, b == lows[i] / kBlock);
  }
  int64_t fault = 0;
  for (i = 0; i < rows; ++i)
    if (!scale_row(dq + i * stride, task.scale, C, task.dq + ((row + i) * task.heads + head) * C) && fault == 0)
      fault = 1 + row + i;
  return fault;
}

// What the round gives to keys [item.first, item.end) of one block.
static void backward_keys(const AttentionBackwardTask& task, const BackwardItem& item, float* part) {
  const KvLayer& layer = task.layer;
  const BackwardStream& stream = task.streams[item.stream];
  const int64_t C = layer.head_dim, stride = layer.value_stride;
  const int64_t first_query = task.query_block * kBlock;
  const int64_t queries = stream.length - first_query < kBlock ? stream.length - first_query : kBlock;
  // Earlier keys leave the window earlier: those that some query of the block sees are the last ones.
  Span spans[kBackwardRows];
  int64_t begin = item.first, count = 0;
  for (int64_t j = item.first; j < item.end; ++j) {
    const int64_t position = item.block * kBlock + j;
    const int64_t low = position > first_query ? position - first_query : 0;
    const int64_t end = task.window > 0 ? position + task.window - first_query : queries;
    const int64_t high = end < queries ? end : queries;
    if (low >= high) {
      begin = j + 1;
      continue;
    }
    spans[count++] = {(int32_t)low, (int32_t)high};
  }
  const int64_t tile = item.block - first_block_seen(first_query, task.window);
  const float* p = stream.tiles + tile * 2 * kBlock * kBlock + begin;
  const float* ds = p + kBlock * kBlock;
  const bool is_first = task.head_of_group == 0 && task.query_block == item.block;
  const int64_t at = ((stream.first_row + item.block * kBlock + begin) * layer.kv_heads + stream.kv_head) * C;
  const auto fold = [&](const float* weights, const float* vectors, float* to) {
    span_chains(count, spans, ColumnsLeft{weights, kBlock}, F32Side{vectors, stride, kLanes}, stride / kLanes, part,
                stride);
    for (int64_t j = 0; j < count; ++j)
      fold_row(to + at + j * layer.kv_heads * C, part + j * stride, C, is_first);
  };
  fold(p, stream.dy, task.dv);
  fold(ds, stream.q, task.dk);
}

static int64_t queries_part(const void* task, int64_t begin, int64_t end, void* scratch) {
  const auto& backward = *static_cast<const AttentionBackwardTask*>(task);
  int64_t fault = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = backward_queries(backward, backward.items[i], static_cast<float*>(scratch));
    if (row != 0 && (fault == 0 || row < fault)) fault = row;
  }
  return fault;
}

static int64_t keys_part(const void* task, int64_t begin, int64_t end, void* scratch) {
  const auto& backward = *static_cast<const AttentionBackwardTask*>(task);
  for (int64_t i = begin; i < end; ++i) backward_keys(backward, backward.items[i], static_cast<float*>(scratch));
  return 0;
}

// Parts are rows: dk times the scale, once all is summed, and whether dk and dv are finite.
static int64_t finish_keys_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& backward = *static_cast<const AttentionBackwardTask*>(task);
  const int64_t width = backward.layer.kv_heads * backward.layer.head_dim;
  int64_t fault = 0;
  for (int64_t r = begin; r < end; ++r) {
    float* dk = backward.dk + r * width;
    bool finite = scale_row(dk, backward.scale, width, dk);
    for (int64_t c = 0; c < width; ++c) finite = finite && is_finite(backward.dv[r * width + c]);
    if (!finite && fault == 0) fault = 1 + r;
  }
  return fault;
}

static int64_t attention_backward_scratch_bytes(const KvLayer& layer) {
  return 2 * kBackwardRows * layer.value_stride * (int64_t)sizeof(float);
}

}  // namespace VOX_ISA
}  // namespace vox
