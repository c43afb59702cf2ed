// Products with float weights: packing, linear, embedding rows.
#pragma once
#include "definitions.h"
#include "matmul_compact.h"
#include "tile.h"

namespace vox {
namespace VOX_ISA {

// Four of a row's chunks side by side, then folded in order: how one row keeps memory busy. Four streams of
// a few KiB each are too short for the hardware to fetch ahead, so the next four chunks are asked for here.
template <class Side>
static void linear_one_row(const float* x, int64_t inputs, const Side& weight, int64_t panel, float* out) {
  VF total = f_splat(0.0f);
  int64_t done = 0;
  for (; done + 4 * kChunk <= inputs; done += 4 * kChunk) {
    VF p0 = f_splat(0.0f), p1 = p0, p2 = p0, p3 = p0;
    const float* a = x + done;
    for (int64_t k = 0; k < kChunk; ++k) {
      if (k % Side::kStepsPerLine == 0)
        for (int64_t j = 4; j < 8; ++j) prefetch_line(weight.at(done + k + j * kChunk, panel));
      p0 = f_fma(f_splat(a[k]), weight.load(done + k, panel), p0);
      p1 = f_fma(f_splat(a[k + kChunk]), weight.load(done + k + kChunk, panel), p1);
      p2 = f_fma(f_splat(a[k + 2 * kChunk]), weight.load(done + k + 2 * kChunk, panel), p2);
      p3 = f_fma(f_splat(a[k + 3 * kChunk]), weight.load(done + k + 3 * kChunk, panel), p3);
    }
    total = chunk_folded(done == 0, total, p0);
    total = f_add(f_add(f_add(total, p1), p2), p3);
  }
  for (; done < inputs; done += kChunk) {
    VF acc[1][1] = {{f_splat(0.0f)}};
    tile_chain<1, 1>(RowsLeft{x, 0}, weight, panel, done, done + kChunk < inputs ? done + kChunk : inputs, acc);
    total = chunk_folded(done == 0, total, acc[0][0]);
  }
  f_store(out, total);
}

// Up to so many rows 16 bits are widened anew for each few of them; more share them as floats.
constexpr int64_t kFewRows = 4 * kTileRows;

// Rows [first, last) of the outputs in `panels` panels, into a tile of kGroupPanels * 16 columns.
template <class Side>
static void linear_group(const LinearTask& task, const Side& weight, int64_t panel, int64_t panels, int64_t first,
                         int64_t last, float* tile_out, float* widened) {
  constexpr int64_t kWidth = kGroupPanels * kLanes;
  const int64_t inputs = task.weight.inputs;
  if (last - first == 1) {
    for (int64_t p = 0; p < panels; ++p)
      linear_one_row(task.x + first * inputs, inputs, weight, panel + p, tile_out + p * kLanes);
    return;
  }
  const bool widen = task.weight.format != Format::f32 && last - first > kFewRows;
  for (int64_t k = 0; k < inputs; k += kChunk) {
    const int64_t end = k + kChunk < inputs ? k + kChunk : inputs;
    const Finish finish = k == 0 ? Finish::store : Finish::fold;
    if (widen)
      for (int64_t p = 0; p < panels; ++p)
        for (int64_t i = k; i < end; ++i) f_store(widened + (p * kChunk + i - k) * kLanes, weight.load(i, panel + p));
    for (int64_t r = first; r < last; r += kTileRows) {
      const int64_t rows = last - r < kTileRows ? last - r : kTileRows;
      const float* x = task.x + r * inputs;
      float* out = tile_out + (r - first) * kWidth;
      if (widen) {
        const F32Side side{widened, kLanes, kChunk * kLanes};
        tile_rows(rows, panels, RowsLeft{x + k, inputs}, side, 0, 0, end - k, out, kWidth, Start::zero, finish);
      } else {
        tile_rows(rows, panels, RowsLeft{x, inputs}, weight, panel, k, end, out, kWidth, Start::zero, finish);
      }
    }
  }
}

static int64_t linear_scratch_bytes(int64_t rows_per_part) {
  return (rows_per_part + kChunk) * kGroupPanels * kLanes * (int64_t)sizeof(float);
}

template <class Weight>
static int64_t linear_parts(const LinearTask& task, const Weight& weight, int64_t begin, int64_t end, float* scratch) {
  constexpr int64_t kWidth = kGroupPanels * kLanes;
  const int64_t outputs = task.weight.outputs;
  float* widened = scratch + task.rows_per_part * kWidth;
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t panel = part / task.row_parts * kGroupPanels;
    const int64_t first = part % task.row_parts * task.rows_per_part;
    const int64_t last = first + task.rows_per_part < task.rows ? first + task.rows_per_part : task.rows;
    const int64_t column = panel * kLanes;
    const int64_t columns = outputs - column < kWidth ? outputs - column : kWidth;
    linear_group(task, weight, panel, (columns + kLanes - 1) / kLanes, first, last, scratch, widened);
    for (int64_t r = first; r < last; ++r) {
      const float* from = scratch + (r - first) * kWidth;
      float* to = task.out + r * outputs + column;
      FiniteWatch watch;
      int64_t i = 0;
      for (; i + kLanes <= columns; i += kLanes) {
        const VF y = f_load(from + i);
        watch.see(y);
        f_store(to + i, y);
      }
      bool finite = watch.saw_only_finite();
      for (; i < columns; ++i) {
        to[i] = from[i];
        finite = finite && is_finite(to[i]);
      }
      if (!finite && (fault == 0 || 1 + r < fault)) fault = 1 + r;
    }
  }
  return fault;
}

static int64_t linear_part(const void* task, int64_t begin, int64_t end, void* scratch) {
  const auto& linear = *static_cast<const LinearTask*>(task);
  auto* memory = static_cast<float*>(scratch);
  const void* panels = linear.weight.panels;
  const auto* halves = static_cast<const uint16_t*>(panels);
  const int64_t inputs = linear.weight.inputs, stride = inputs * kLanes;
  switch (linear.weight.format) {
    case Format::f32:
      return linear_parts(linear, F32Side{static_cast<const float*>(panels), kLanes, stride}, begin, end, memory);
    case Format::f16: return linear_parts(linear, F16Side{halves, kLanes, stride}, begin, end, memory);
    case Format::bf16: return linear_parts(linear, Bf16Side{halves, kLanes, stride}, begin, end, memory);
    default:
      return linear_parts(linear, CompactMatrix(panels, linear.weight.outputs, inputs), begin, end, memory);
  }
}

// Returns 0, or 1 + the first output with a weight that is not finite: its bits have `exponent` full.
template <class Element>
static int64_t pack_panels(const PackTask& task, int64_t begin, int64_t end, Element exponent) {
  const auto* source = static_cast<const Element*>(task.source);
  auto* panels = static_cast<Element*>(task.panels);
  int64_t fault = 0;
  for (int64_t panel = begin; panel < end; ++panel) {
    Element* to = panels + panel * task.inputs * kPanel;
    for (int64_t j = 0; j < kPanel; ++j) {
      const int64_t output = panel * kPanel + j;
      const Element* from = source + output * task.inputs;
      if (output >= task.outputs) {
        for (int64_t k = 0; k < task.inputs; ++k) to[k * kPanel + j] = 0;
        continue;
      }
      bool finite = true;
      for (int64_t k = 0; k < task.inputs; ++k) {
        finite = finite && (from[k] & exponent) != exponent;
        to[k * kPanel + j] = from[k];
      }
      if (!finite && fault == 0) fault = 1 + output;
    }
  }
  return fault;
}

static int64_t pack_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& pack = *static_cast<const PackTask*>(task);
  // Weights move as bits: nothing is flushed or quieted on the way.
  switch (pack.format) {
    case Format::f32: return pack_panels<uint32_t>(pack, begin, end, 0x7F800000u);
    case Format::f16: return pack_panels<uint16_t>(pack, begin, end, 0x7C00u);
    default: return pack_panels<uint16_t>(pack, begin, end, 0x7F80u);
  }
}

// Sixteen elements starting at `index`, the first `count` of them, as floats.
CANON VF load_widened(Format format, const void* source, int64_t index, int64_t count) {
  if (format == Format::f32) {
    const float* from = static_cast<const float*>(source) + index;
    return count >= kLanes ? f_load(from) : f_load_some(from, count);
  }
  const uint16_t* from = static_cast<const uint16_t*>(source) + index;
  uint16_t lanes[kLanes] = {};
  if (count < kLanes) {
    __builtin_memcpy(lanes, from, (size_t)count * 2);
    from = lanes;
  }
  return format == Format::f16 ? f_load_f16(from) : f_load_bf16(from);
}

static int64_t widen_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& widen = *static_cast<const WidenTask*>(task);
  const int64_t last = end * kElementsPerPart < widen.elements ? end * kElementsPerPart : widen.elements;
  FiniteWatch watch;
  for (int64_t i = begin * kElementsPerPart; i < last; i += kLanes) {
    const int64_t count = last - i < kLanes ? last - i : kLanes;
    VF y = load_widened(widen.format, widen.source, i, count);
    y = widen.add_one ? f_add(y, F_CONST(VF, 0x3F800000u)) : f_mul(y, f_splat(widen.one));
    watch.see(y);
    if (count == kLanes)
      f_store(widen.out + i, y);
    else
      f_store_some(widen.out + i, y, count);
  }
  return watch.saw_only_finite() ? 0 : 1;
}

template <class Element>
static void gather_row(const PackedWeight& table, int64_t row, Element* to) {
  const Element* from =
      static_cast<const Element*>(table.panels) + row / kPanel * table.inputs * kPanel + row % kPanel;
  for (int64_t k = 0; k < table.inputs; ++k) to[k] = from[k * kPanel];
}

static int64_t embed_part(const void* task, int64_t begin, int64_t end, void* scratch) {
  const auto& embed = *static_cast<const EmbedTask*>(task);
  const int64_t width = embed.table.inputs;
  const VF scale = f_splat(embed.scale);
  int64_t fault = 0;
  for (int64_t r = begin; r < end; ++r) {
    if (embed.table.format == Format::f32)
      gather_row(embed.table, embed.token_ids[r], static_cast<uint32_t*>(scratch));
    else if (embed.table.format == Format::bf16_compact)
      gather_row(CompactMatrix(embed.table.panels, embed.table.outputs, width), width, embed.token_ids[r],
                 static_cast<uint16_t*>(scratch));
    else
      gather_row(embed.table, embed.token_ids[r], static_cast<uint16_t*>(scratch));
    FiniteWatch watch;
    for (int64_t i = 0; i < width; i += kLanes) {
      const int64_t count = width - i < kLanes ? width - i : kLanes;
      const VF y = f_mul(load_widened(embed.table.format, scratch, i, count), scale);
      watch.see(y);
      float* to = embed.out + r * width + i;
      if (count == kLanes)
        f_store(to, y);
      else
        f_store_some(to, y, count);
    }
    if (!watch.saw_only_finite() && fault == 0) fault = 1 + r;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
