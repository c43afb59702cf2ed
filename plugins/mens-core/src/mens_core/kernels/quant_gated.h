// gate(x G^T) * (x U^T) of many rows: sixteen outputs of both products are gated where they were made, in a core's
// first cache, and neither product is written out. The operations are those of the three operators.
#pragma once
#include "gates.h"
#include "quant_linear.h"

namespace vox {
namespace VOX_ISA {

// One group's outputs of rows [row, end) to [rows][16]; `row` begins a panel. 0, or 1 + the first row that is not finite.
template <class F>
static int64_t group_into(quant::LinearTask task, int64_t group, int64_t row, int64_t end, float* to) {
  constexpr quant::Layout layout = quant::layout_of(F::format);
  using Block = quant::BlockOf<layout.block>;
  const int64_t blocks = task.columns / layout.block;
  const uint8_t* packed = task.packed + group * quant::group_bytes(layout, blocks);
  const uint8_t* lower = task.packed + quant::lower_of(layout, task.outputs, blocks, group);
  task.codes += row * task.columns;
  task.blocks = static_cast<const Block*>(task.blocks) + row * blocks;
  task.outputs = quant::kGroupRows;  // those that a last group lacks are zero
  task.y = to;
  const int64_t fault = group_rows<F, kQuantTile>(packed, lower, task, 0, 0, end - row);
  return fault == 0 ? 0 : fault + row;
}

static int64_t outputs_into(const quant::LinearTask& task, int64_t group, int64_t row, int64_t end, float* to) {
  switch (task.format) {
    case quant::kQ8_0: return group_into<OfFormat<quant::kQ8_0, CodesQ8_0>>(task, group, row, end, to);
    case quant::kQ5_0: return group_into<OfFormat<quant::kQ5_0, CodesQ5_0>>(task, group, row, end, to);
    case quant::kQ4_0: return group_into<OfFormat<quant::kQ4_0, CodesQ4_0>>(task, group, row, end, to);
    case quant::kQ4_K: return group_into<OfFormat<quant::kQ4_K, CodesQ4_K>>(task, group, row, end, to);
    case quant::kQ5_K: return group_into<OfFormat<quant::kQ5_K, CodesQ5_K>>(task, group, row, end, to);
    case quant::kQ6_K: return group_into<OfFormat<quant::kQ6_K, CodesQ6_K>>(task, group, row, end, to);
    case quant::kQ8_0Upper: return group_into<OfFormat<quant::kQ8_0Upper, CodesQ8_0Halves>>(task, group, row, end, to);
    default: return 0;
  }
}

template <class Gate>
static int64_t gated_parts(const quant::GatedTask& task, int64_t begin, int64_t end, Gate gated) {
  const int64_t width = task.gate.outputs, groups = quant::groups_of(width);
  alignas(64) float gate[quant::kRowsPerPart * quant::kGroupRows], up[quant::kRowsPerPart * quant::kGroupRows];
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t group = part % groups, row = part / groups * quant::kRowsPerPart, output = group * quant::kGroupRows;
    const int64_t row_end = row + quant::kRowsPerPart < task.gate.rows ? row + quant::kRowsPerPart : task.gate.rows;
    const int64_t count = width - output < quant::kGroupRows ? width - output : quant::kGroupRows;
    const auto note = [&fault](int64_t found) {
      if (found != 0 && (fault == 0 || found < fault)) fault = found;
    };
    note(outputs_into(task.gate, group, row, row_end, gate));
    note(outputs_into(task.up, group, row, row_end, up));
    for (int64_t r = row; r < row_end; ++r) {
      const int64_t at = (r - row) * quant::kGroupRows;
      const VF y = gated(f_load(gate + at), f_load(up + at));
      float* to = task.out + r * width + output;
      FiniteWatch watch;
      if (count == quant::kGroupRows) f_store(to, y);
      else f_store_some(to, y, count);
      watch.see(count == quant::kGroupRows ? y : f_load_some(to, count));
      if (!watch.saw_only_finite()) note(1 + r);
    }
  }
  return fault;
}

static int64_t quant_gated_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::GatedTask*>(opaque);
  if (task.is_silu) return gated_parts(task, begin, end, [](VF gate, VF up) { return silu_gated(gate, up); });
  return gated_parts(task, begin, end, [](VF gate, VF up) { return gelu_gated(gate, up); });
}

}  // namespace VOX_ISA
}  // namespace vox
