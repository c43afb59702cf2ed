// The C ABI of the float operators: pointers in, a task for the pool out.
#include "abi.h"

#include <stddef.h>

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

#include "backward_abi.h"
#include "compact_layout.h"
#include "float_kernels.h"
#include "plan.h"
#include "tasks.h"

namespace {

using namespace vox;

const PerIsa<FloatKernels> kFloat = {{
#if defined(VOX_HAS_AVX2)
    &avx2::float_kernels, &avx512::float_kernels, nullptr,
#else
    nullptr, nullptr, &neon::float_kernels,
#endif
}};

int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

int64_t run_elementwise(Part part, const ElementwiseTask& task, int64_t nanoseconds_per_part) {
  return run({part, &task, parts_of(task.elements, kElementsPerPart), nanoseconds_per_part});
}

static_assert(VOX_BF16_COMPACT == static_cast<int32_t>(Format::bf16_compact));
int64_t element_bytes(int32_t format) { return format == 0 ? 4 : 2; }

PackedWeight packed_weight(int32_t format, const void* panels, int64_t outputs, int64_t inputs) {
  return {static_cast<Format>(format), panels, outputs, inputs};
}

bool are_rows_in_range(const Rows& rows, int64_t count, int64_t blocks) {
  for (int64_t s = 0; s < rows.sequences; ++s) {
    const int32_t* table = rows.block_tables + s * rows.blocks_per_sequence;
    if (rows.starts[s] > rows.starts[s + 1]) return false;
    for (int64_t r = rows.starts[s]; r < rows.starts[s + 1]; ++r) {
      const int64_t position = rows.positions[r];
      if (position < 0 || position / kBlock >= rows.blocks_per_sequence) return false;
      if (r > rows.starts[s] && position <= rows.positions[r - 1]) return false;
    }
    if (rows.starts[s] == rows.starts[s + 1]) continue;
    for (int64_t b = 0; b <= rows.positions[rows.starts[s + 1] - 1] / kBlock; ++b)
      if (table[b] >= blocks) return false;
  }
  return rows.starts[0] == 0 && rows.starts[rows.sequences] == count;
}

// The blocks that attention reads: a window's early blocks may be gone (-1).
bool are_blocks_present(const Rows& rows, int64_t window) {
  for (int64_t s = 0; s < rows.sequences; ++s) {
    if (rows.starts[s] == rows.starts[s + 1]) continue;
    const int64_t first = window > 0 ? rows.positions[rows.starts[s]] - window + 1 : 0;
    const int64_t last = rows.positions[rows.starts[s + 1] - 1];
    for (int64_t b = (first > 0 ? first : 0) / kBlock; b <= last / kBlock; ++b)
      if (rows.block_tables[s * rows.blocks_per_sequence + b] < 0) return false;
  }
  return true;
}

KvLayer kv_layer(float* keys, float* values, int64_t kv_heads, int64_t head_dim) {
  return {keys, values, kv_heads, head_dim, parts_of(head_dim, kPanel) * kPanel};
}

// The items that will be taken last in halves: a thread that finds none left waits for the other's.
void halve_last(std::vector<AttentionItem>& items, size_t count) {
  const size_t kept = items.size() - count;
  for (size_t i = kept, end = items.size(); i < end; ++i) {
    AttentionItem& item = items[i];
    const int32_t middle = (item.first_row + item.end_row) / 2;
    if (middle == item.first_row) continue;
    AttentionItem first = item;
    first.end_row = middle;
    item.first_row = middle;
    items.push_back(first);
  }
}

// Cuts the step into items of at most kAttentionRows query vectors, and small enough that every
// thread gets one, late positions first: they see the most. The cut changes no bit.
std::vector<AttentionItem> attention_items(const Rows& rows, int64_t count, int64_t heads, int64_t kv_heads) {
  const int64_t group = heads / kv_heads;
  int64_t heads_per_item = group < kAttentionRows ? group : kAttentionRows;
  while (heads_per_item > 1 && count * kv_heads * parts_of(group, heads_per_item) < threads())
    heads_per_item = parts_of(heads_per_item, 2);
  int64_t rows_per_item = kAttentionRows / heads_per_item;
  const int64_t even = parts_of(count * kv_heads * parts_of(group, heads_per_item), threads());
  if (rows_per_item > even) rows_per_item = even;
  std::vector<AttentionItem> items;
  for (int64_t s = 0; s < rows.sequences; ++s)
    for (int64_t r = rows.starts[s]; r < rows.starts[s + 1]; r += rows_per_item)
      for (int64_t g = 0; g < kv_heads; ++g)
        for (int64_t h = 0; h < group; h += heads_per_item) {
          const int64_t end_row = r + rows_per_item < rows.starts[s + 1] ? r + rows_per_item : rows.starts[s + 1];
          const int64_t end_head = h + heads_per_item < group ? h + heads_per_item : group;
          items.push_back({static_cast<int32_t>(s), static_cast<int32_t>(r), static_cast<int32_t>(end_row),
                           static_cast<int32_t>(g), static_cast<int32_t>(g * group + h),
                           static_cast<int32_t>(g * group + end_head)});
        }
  std::reverse(items.begin(), items.end());
  const size_t last = 2 * static_cast<size_t>(threads());
  if (threads() > 1 && items.size() > 2 * last) halve_last(items, last);
  return items;
}

// Equal pieces into which a row of logits can be cut, none too short to be worth a part.
int64_t pieces_of(int64_t width) {
  int64_t pieces = 64;
  while (pieces > 1 && (width % pieces != 0 || width / pieces < 1024)) pieces /= 2;
  return pieces;
}

int64_t attention_nanoseconds(const AttentionTask& task, int64_t count, size_t items) {
  int64_t seen = 0;
  for (int64_t r = 0; r < count; ++r) {
    const int64_t position = task.rows.positions[r] + 1;
    seen += task.window > 0 && position > task.window ? task.window : position;
  }
  // Two products per position and channel, at a modest 16 multiply-adds a nanosecond.
  return seen * task.heads * task.layer.head_dim / 8 / static_cast<int64_t>(items) + 200;
}

}  // namespace

extern "C" {

int64_t vox_pack(int32_t format, const void* source, int64_t outputs, int64_t inputs, void* packed) {
  const PackTask task{static_cast<Format>(format), source, packed, outputs, inputs};
  return run({kFloat.active().pack, &task, parts_of(outputs, kPanel), inputs * 8});
}

int64_t vox_compact_measure(const void* source, int64_t outputs, int64_t inputs, uint8_t* tables, int64_t* kept) {
  const CompactMeasureTask task{source, outputs, inputs, tables, kept};
  return run({kFloat.active().compact_measure, &task, compact::panels_of(outputs), inputs * 8, inputs});
}

int64_t vox_compact_bytes(int64_t outputs, int64_t inputs, int64_t kept) {
  return compact::panels_of(outputs) * compact::panel_bytes(inputs) +
         kept * static_cast<int64_t>(sizeof(compact::Kept));
}

int64_t vox_compact_pack(const void* source, int64_t outputs, int64_t inputs, const uint8_t* tables,
                         const int64_t* firsts, void* packed) {
  const CompactPackTask task{source, outputs, inputs, tables, firsts, packed};
  return run({kFloat.active().compact_pack, &task, compact::panels_of(outputs), inputs * 8});
}

int64_t vox_widen(int32_t format, const void* source, int64_t elements, int32_t add_one, float* out) {
  const WidenTask task{static_cast<Format>(format), source, out, elements, add_one != 0, 1.0f};
  return run({kFloat.active().widen, &task, parts_of(elements, kElementsPerPart), 150});
}

int64_t vox_embed(int32_t format, const void* packed, int64_t outputs, int64_t inputs, const int32_t* token_ids,
                  int64_t rows, float scale, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    if (token_ids[r] < 0 || token_ids[r] >= outputs) return VOX_OUT_OF_RANGE;
  const EmbedTask task{packed_weight(format, packed, outputs, inputs), token_ids, scale, out};
  return run({kFloat.active().embed, &task, rows, inputs, inputs * element_bytes(format)});
}

int64_t vox_linear(int32_t format, const void* packed, int64_t outputs, int64_t inputs, const float* x, int64_t rows,
                   float* out) {
  if (rows == 0) return 0;
  const FloatKernels& kernels = kFloat.active();
  const int64_t columns = kernels.group_panels * kPanel;
  const int64_t groups = parts_of(outputs, columns);
  // Many rows share a group's weights from the cache; few groups are cut by rows as well.
  int64_t rows_per_part = rows < 96 ? rows : 96;
  while (groups * parts_of(rows, rows_per_part) < 2 * threads() && rows_per_part > 24)
    rows_per_part = parts_of(rows_per_part, 2);
  const LinearTask task{packed_weight(format, packed, outputs, inputs), x, out, rows, rows_per_part,
                        parts_of(rows, rows_per_part)};
  const int64_t bytes = format == VOX_BF16_COMPACT ? kernels.group_panels * compact::panel_bytes(inputs)
                                                   : inputs * columns * element_bytes(format);
  const int64_t products = inputs * columns * rows_per_part;
  Work work(kernels.linear, &task, groups * task.row_parts, bytes / 16 + products / 24,
            kernels.linear_scratch_bytes(rows_per_part));
  if (task.row_parts == 1) work.reads(packed, bytes);
  return run(work);
}

int64_t vox_norm(const float* x, const float* weight, int64_t rows, int64_t heads, int64_t width, float eps,
                 float* out) {
  const NormTask task{x, weight, out, rows * heads, width, heads, eps};
  return run({kFloat.active().norm, &task, parts_of(task.rows, kNormRows), kNormRows * width / 2});
}

int64_t vox_rotary(const uint64_t* frequencies, int64_t pairs, uint64_t factor_low, uint64_t factor_high,
                   int64_t first_position, int64_t positions, float* table) {
  const RotaryTask task{frequencies, factor_low, factor_high, first_position, pairs, table};
  return run({kFloat.active().rotary, &task, positions, pairs * 300});
}

int64_t vox_rope(const float* x, int64_t rows, int64_t heads, int64_t pairs, const float* table, const int32_t* slots,
                 int64_t slot_count, const int32_t* positions, float* out) {
  for (int64_t r = 0; r < rows; ++r)
    if (positions[r] < 0 || positions[r] / kBlock >= slot_count || slots[positions[r] / kBlock] < 0)
      return VOX_OUT_OF_RANGE;
  const RopeTask task{x, out, table, slots, positions, heads, pairs};
  return run({kFloat.active().rope, &task, rows, heads * pairs / 2});
}

int64_t vox_kv_append(const float* k, const float* v, int64_t rows, int64_t kv_heads, int64_t head_dim,
                      const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t sequences,
                      int64_t blocks_per_sequence, int64_t blocks, float* keys, float* values) {
  const KvAppendTask task{kv_layer(keys, values, kv_heads, head_dim),
                          {positions, starts, block_tables, sequences, blocks_per_sequence}, k, v};
  if (!are_rows_in_range(task.rows, rows, blocks)) return VOX_OUT_OF_RANGE;
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t r = starts[s]; r < starts[s + 1]; ++r)
      if (block_tables[s * blocks_per_sequence + positions[r] / kBlock] < 0) return VOX_OUT_OF_RANGE;
  return run({kFloat.active().kv_append, &task, rows, kv_heads * head_dim * 2});
}

int64_t vox_attention(const float* q, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t sequences,
                      int64_t blocks_per_sequence, int64_t blocks, const float* keys, const float* values, float scale,
                      int64_t window, float softcap, float* out) {
  return vox_attention_saving(q, rows, heads, kv_heads, head_dim, positions, starts, block_tables, sequences,
                              blocks_per_sequence, blocks, keys, values, scale, window, softcap, out, nullptr, nullptr);
}

int64_t vox_attention_saving(const float* q, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             const int32_t* positions, const int32_t* starts, const int32_t* block_tables,
                             int64_t sequences, int64_t blocks_per_sequence, int64_t blocks, const float* keys,
                             const float* values, float scale, int64_t window, float softcap, float* out, float* m,
                             float* l) {
  if (rows == 0) return 0;
  const FloatKernels& kernels = kFloat.active();
  AttentionTask task{kv_layer(const_cast<float*>(keys), const_cast<float*>(values), kv_heads, head_dim),
                     {positions, starts, block_tables, sequences, blocks_per_sequence},
                     nullptr, q, out, heads, scale, window, softcap, m, l};
  if (!are_rows_in_range(task.rows, rows, blocks) || !are_blocks_present(task.rows, window)) return VOX_OUT_OF_RANGE;
  try {
    std::vector<AttentionItem> items = attention_items(task.rows, rows, heads, kv_heads);
    const auto count = static_cast<int64_t>(items.size());
    const int64_t nanoseconds = attention_nanoseconds(task, rows, items.size());
    if (Plan* plan = Plan::collecting()) task.items = plan->keep(std::move(items));
    else task.items = items.data();
    return run({kernels.attention, &task, count, nanoseconds, kernels.attention_scratch_bytes(task.layer)});
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
}

int64_t vox_add(const float* a, const float* b, int64_t rows, int64_t width, float* out) {
  return run_elementwise(kFloat.active().add, {a, b, out, rows * width, width, 0.0f}, 150);
}

int64_t vox_silu_gate(const float* gate, const float* up, int64_t rows, int64_t width, float* out) {
  return run_elementwise(kFloat.active().silu_gate, {gate, up, out, rows * width, width, 0.0f}, 1200);
}

int64_t vox_gelu_gate(const float* gate, const float* up, int64_t rows, int64_t width, float* out) {
  return run_elementwise(kFloat.active().gelu_gate, {gate, up, out, rows * width, width, 0.0f}, 1200);
}

int64_t vox_softcap(const float* x, int64_t rows, int64_t width, float cap, float* out) {
  return run_elementwise(kFloat.active().softcap, {x, nullptr, out, rows * width, width, cap}, 2000);
}

int64_t vox_argmax(const float* x, int64_t rows, int64_t width, int32_t* out) {
  // Pieces of a row find their maximum at once; the first piece that has the row's holds the lowest id.
  const int64_t pieces = pieces_of(width), piece = width / pieces;
  try {
    std::vector<float> most(static_cast<size_t>(rows * pieces));
    const RowMaxTask search{x, piece, most.data()};
    if (const int64_t code = run({kFloat.active().row_max, &search, rows * pieces, piece / 16}); code != 0) return code;
    for (int64_t r = 0; r < rows; ++r) {
      const float* row = most.data() + r * pieces;
      int64_t best = 0;
      for (int64_t i = 1; i < pieces; ++i)
        if (row[i] > row[best]) best = i;
      const ArgmaxTask task{x + r * width + best * piece, piece, out + r};
      if (const int64_t code = run({kFloat.active().argmax, &task, 1, piece / 8}); code != 0) return code;
      out[r] += static_cast<int32_t>(best * piece);
    }
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
  return 0;
}

int64_t vox_token_weights(const float* x, int64_t width, float temperature, uint64_t* out) {
  float max = 0.0f;
  const RowMaxTask row{x, width, &max};
  if (const int64_t code = run({kFloat.active().row_max, &row, 1, width / 16}); code != 0) return code;
  const TokenWeightsTask task{x, width, max, temperature, out};
  return run({kFloat.active().token_weights, &task, parts_of(width, kElementsPerPart), 1500});
}

int64_t vox_log_normaliser(const float* x, int64_t rows, int64_t width, float* out) {
  const LogNormaliserTask task{x, width, out};
  return run({kFloat.active().log_normaliser, &task, rows, width});
}

int64_t vox_penalise(float* logits, int64_t width, const int32_t* token_ids, int64_t count, const float* repetition,
                     const float* subtract) {
  for (int64_t i = 0; i < count; ++i)
    if (token_ids[i] < 0 || token_ids[i] >= width) return VOX_OUT_OF_RANGE;
  const PenaliseTask task{logits, token_ids, count, repetition, subtract};
  return run({kFloat.active().penalise, &task, 1, count});
}

int64_t vox_function(int32_t which, const float* x, int64_t elements, float* out) {
  const ElementwiseTask task{x, nullptr, out, elements, elements, 0.0f};
  run_elementwise(kFloat.active().functions[which], task, 1500);
  return 0;  // a function of any bits has no fault
}
}
