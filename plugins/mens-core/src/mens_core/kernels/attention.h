// KV blocks and attention over them: docs/numerics.md, attention.
#pragma once
#include "definitions.h"
#include "spans.h"
#include "transpose.h"

namespace vox {
namespace VOX_ISA {

static int64_t sequence_of(const Rows& rows, int64_t row) {
  int64_t s = 0;
  while (rows.starts[s + 1] <= row) ++s;
  return s;
}

// Rows of one sequence that follow one another in one block, at most four, from r on; which block and slot they begin at.
struct AppendRun {
  int64_t rows, block, slot;
};
static AppendRun append_run(const Rows& rows, int64_t r, int64_t end) {
  const int64_t s = sequence_of(rows, r);
  const int64_t position = rows.positions[r];
  const int64_t last = rows.starts[s + 1] < end ? rows.starts[s + 1] : end;
  int64_t count = 1;
  while (count < 4 && r + count < last && rows.positions[r + count] == position + count &&
         (position + count) % kBlock != 0)
    ++count;
  return {count, rows.block_tables[s * rows.blocks_per_sequence + position / kBlock], position % kBlock};
}

static int64_t kv_append_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& append = *static_cast<const KvAppendTask*>(task);
  const KvLayer& layer = append.layer;
  const int64_t C = layer.head_dim, stride = layer.kv_heads * C;
  for (int64_t r = begin; r < end;) {
    const AppendRun run = append_run(append.rows, r, end);
    for (int64_t g = 0; g < layer.kv_heads; ++g) {
      const int64_t cache = run.block * layer.kv_heads + g;
      transpose(append.k + r * stride + g * C, stride, run.rows, C, layer.keys + cache * C * kBlock + run.slot, kBlock);
      for (int64_t i = 0; i < run.rows; ++i)
        __builtin_memcpy(layer.values + (cache * kBlock + run.slot + i) * layer.value_stride,
                         append.v + (r + i) * stride + g * C, (size_t)C * sizeof(float));
    }
    r += run.rows;
  }
  return 0;
}

// One item's working set, laid out in the thread's scratch. Row i is one query vector.
struct AttentionScratch {
  float* q;       // [rows][head_dim]
  float* scores;  // [rows][128], then the weights
  float* o;       // [rows][value_stride]
  float* o_block; // [rows][value_stride]

  AttentionScratch(void* memory, const KvLayer& layer) {
    float* at = static_cast<float*>(memory);
    const auto take = [&at](int64_t per_row) {
      float* taken = at;
      at += kAttentionRows * ((per_row + kLanes - 1) / kLanes * kLanes);
      return taken;
    };
    q = take(layer.head_dim);
    scores = take(kBlock);
    o = take(layer.value_stride);
    o_block = take(layer.value_stride);
  }
};

static int64_t attention_scratch_bytes(const KvLayer& layer) {
  return kAttentionRows * (kBlock + 3 * layer.value_stride) * (int64_t)sizeof(float);
}

struct RowState {
  float m, l;
  bool started;
};

// scores = C128(q k) * scale, softcapped, for the panels of slots that some row of a tile sees.
static void block_scores(const AttentionTask& task, const AttentionScratch& memory, int64_t rows, const float* keys,
                         const Span* spans) {
  const int64_t C = task.layer.head_dim;
  const F32Side side{keys, kBlock, kLanes};
  const VF scale = f_splat(task.scale);
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t some = rows - r < kTileRows ? rows - r : kTileRows;
    // Positions and their windows ascend from row to row.
    const int64_t first = spans[r].low / kLanes, end = (spans[r + some - 1].high + kLanes - 1) / kLanes;
    float* scores = memory.scores + r * kBlock;
    for (int64_t c = 0; c < C; c += kChunk)
      tile_rows(some, end - first, RowsLeft{memory.q + r * C, C}, side, first, c, c + kChunk < C ? c + kChunk : C,
                scores + first * kLanes, kBlock, Start::zero, c == 0 ? Finish::store : Finish::fold);
    for (int64_t i = 0; i < some; ++i, scores += kBlock)
      for (int64_t p = first * kLanes; p < end * kLanes; p += kLanes) {
        VF s = f_mul(f_load(scores + p), scale);
        if (task.softcap != 0.0f) s = f_softcap(s, f_splat(task.softcap));
        f_store(scores + p, s);
      }
  }
}

// m_b of a row. A score that is NaN makes its weight one, and l, whatever is found here.
static float block_most(float* scores, Span span) {
  const int64_t first = span.low / kLanes * kLanes;
  const int64_t last = (span.high + kLanes - 1) / kLanes * kLanes;
  // Masked slots of the outer panels repeat an unmasked score: the maximum can't see them.
  const float any = scores[span.low];
  for (int64_t j = first; j < span.low; ++j) scores[j] = any;
  for (int64_t j = span.high; j < last; ++j) scores[j] = any;
  VF most = f_load(scores + first);
  for (int64_t j = first + kLanes; j < last; j += kLanes) most = f_max(most, f_load(scores + j));
  return f_add(f_most(most), 0.0f);  // -0 counts as +0
}

// The weights exp(s - m_b) in place of the scores.
static void block_weights(float* scores, Span span, float m) {
  const VF m_all = f_splat(m);
  for (int64_t j = span.low / kLanes * kLanes; j < span.high; j += kLanes)
    f_store(scores + j, f_exp(f_sub(f_load(scores + j), m_all)));
}

// l_b of `Side` rows side by side; each starts and stops where its own span does.
template <int Side>
static void block_sums(const float* weights, const Span* spans, float* sums) {
  int32_t low = spans[0].low, high = spans[0].high;
  for (int i = 1; i < Side; ++i) {
    low = spans[i].low > low ? spans[i].low : low;
    high = spans[i].high < high ? spans[i].high : high;
  }
  if (low >= high) {
    for (int i = 0; i < Side; ++i) {
      sums[i] = 0.0f;
      for (int32_t j = spans[i].low; j < spans[i].high; ++j) sums[i] = f_add(sums[i], weights[i * kBlock + j]);
    }
    return;
  }
  float l[Side];
  for (int i = 0; i < Side; ++i) {
    l[i] = 0.0f;
    for (int32_t j = spans[i].low; j < low; ++j) l[i] = f_add(l[i], weights[i * kBlock + j]);
  }
  for (int32_t j = low; j < high; ++j)
    for (int i = 0; i < Side; ++i) l[i] = f_add(l[i], weights[i * kBlock + j]);
  for (int i = 0; i < Side; ++i) {
    for (int32_t j = high; j < spans[i].high; ++j) l[i] = f_add(l[i], weights[i * kBlock + j]);
    sums[i] = l[i];
  }
}

// o_b: the chain over each row's own slots.
static void block_values(const AttentionTask& task, const AttentionScratch& memory, int64_t rows, const float* values,
                         const Span* spans) {
  const int64_t stride = task.layer.value_stride;
  span_chains(rows, spans, RowsLeft{memory.scores, kBlock}, F32Side{values, stride, kLanes}, stride / kLanes,
              memory.o_block, stride);
}

// (m, l, o) after the block of one row: assigned by the first block, folded by later ones.
static void fold_block(RowState& row, float* o, float m_block, float l_block, const float* o_block, int64_t stride) {
  if (!row.started) {
    row = {m_block, l_block, true};
    __builtin_memcpy(o, o_block, (size_t)stride * sizeof(float));
    return;
  }
  const Shares shares = shares_of(row.m, m_block);
  row.m = shares.m;
  row.l = block_folded(row.l, shares.old_share, l_block, shares.new_share);
  const VF old_share = f_splat(shares.old_share), new_share = f_splat(shares.new_share);
  for (int64_t c = 0; c < stride; c += kLanes)
    f_store(o + c, block_folded(f_load(o + c), old_share, f_load(o_block + c), new_share));
}

static bool finish_row(const RowState& row, const float* o, float* out, int64_t head_dim) {
  const VF l = f_splat(row.l);
  FiniteWatch watch;
  for (int64_t c = 0; c < head_dim; c += kLanes) {
    const VF y = f_div(f_load(o + c), l);
    if (const int64_t left = head_dim - c; left >= kLanes) {
      f_store(out + c, y);
      watch.see(y);
    } else {
      f_store_some(out + c, y, left);
      watch.see(f_load_some(out + c, left));
    }
  }
  return watch.saw_only_finite();
}

static int64_t attend(const AttentionTask& task, const AttentionItem& item, void* scratch) {
  const KvLayer& layer = task.layer;
  const int64_t C = layer.head_dim, heads = item.end_head - item.first_head;
  const int64_t rows = (item.end_row - item.first_row) * heads;
  const AttentionScratch memory(scratch, layer);
  RowState state[kAttentionRows];
  int32_t lows[kAttentionRows], positions[kAttentionRows];
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = item.first_row + i / heads, head = item.first_head + i % heads;
    __builtin_memcpy(memory.q + i * C, task.q + (row * task.heads + head) * C, (size_t)C * sizeof(float));
    const int32_t position = task.rows.positions[row];
    const int64_t low = task.window > 0 ? position - task.window + 1 : 0;
    positions[i] = position;
    lows[i] = low > 0 ? (int32_t)low : 0;
    state[i] = {0.0f, 0.0f, false};
  }
  const int32_t* table = task.rows.block_tables + item.sequence * task.rows.blocks_per_sequence;
  // Positions and their windows ascend, so the first row opens the first block and the last row the last.
  for (int64_t b = lows[0] / kBlock; b <= positions[rows - 1] / kBlock; ++b) {
    // Rows that see something of this block are consecutive: [begin, end).
    Span spans[kAttentionRows];
    int64_t begin = rows, end = 0;
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t first = b * kBlock;
      const int64_t low = lows[i] > first ? lows[i] - first : 0;
      const int64_t high = positions[i] - first + 1 < kBlock ? positions[i] - first + 1 : kBlock;
      spans[i] = {(int32_t)low, (int32_t)high};
      if (low >= high) continue;
      begin = i < begin ? i : begin;
      end = i + 1;
    }
    if (begin >= end) continue;
    const int64_t cache = (int64_t)table[b] * layer.kv_heads + item.kv_head;
    const int64_t count = end - begin;
    AttentionScratch here = memory;
    here.q += begin * C;
    here.scores += begin * kBlock;
    here.o += begin * layer.value_stride;
    here.o_block += begin * layer.value_stride;
    block_scores(task, here, count, layer.keys + cache * C * kBlock, spans + begin);
    float m_block[kAttentionRows], l_block[kAttentionRows];
    for (int64_t i = 0; i < count; ++i) m_block[i] = block_most(here.scores + i * kBlock, spans[begin + i]);
    for (int64_t i = 0; i < count; ++i) block_weights(here.scores + i * kBlock, spans[begin + i], m_block[i]);
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) block_sums<8>(here.scores + i * kBlock, spans + begin + i, l_block + i);
    for (; i + 4 <= count; i += 4) block_sums<4>(here.scores + i * kBlock, spans + begin + i, l_block + i);
    for (; i < count; ++i) block_sums<1>(here.scores + i * kBlock, spans + begin + i, l_block + i);
    block_values(task, here, count, layer.values + cache * kBlock * layer.value_stride, spans + begin);
    for (i = 0; i < count; ++i)
      fold_block(state[begin + i], here.o + i * layer.value_stride, m_block[i], l_block[i],
                 here.o_block + i * layer.value_stride, layer.value_stride);
  }
  int64_t fault = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t row = item.first_row + i / heads, head = item.first_head + i % heads;
    if (!finish_row(state[i], memory.o + i * layer.value_stride, task.out + (row * task.heads + head) * C, C) &&
        fault == 0)
      fault = 1 + row;
    if (task.m != nullptr) {
      task.m[row * task.heads + head] = state[i].m;
      task.l[row * task.heads + head] = state[i].l;
    }
  }
  return fault;
}

static int64_t attention_part(const void* task, int64_t begin, int64_t end, void* scratch) {
  const auto& attention = *static_cast<const AttentionTask*>(task);
  int64_t fault = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = attend(attention, attention.items[i], scratch);
    if (row != 0 && (fault == 0 || row < fault)) fault = row;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
