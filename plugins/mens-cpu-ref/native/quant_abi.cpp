// The C ABI of the quantised operators: shapes checked, a task for the pool out.
#include "quant_abi.h"

#include "quant_formats.h"
#include "quant_kernels.h"
#include "quant_pack.h"
#include "quant_table.h"

namespace {

const vox::PerIsa<vox::QuantKernels> kQuant = {{
#if defined(VOX_HAS_AVX2)
    &vox::avx2::quant_kernels, &vox::avx512::quant_kernels, nullptr, nullptr,
#else
    nullptr, nullptr, &vox::neon::quant_kernels, &vox::neon_dot::quant_kernels,
#endif
}};

bool is_possible(int32_t format, int64_t rows, int64_t columns) {
  const int32_t block = vox::quant::layout_of(format).block;
  return block != 0 && rows > 0 && columns > 0 && columns % block == 0;
}

using vox::quant::groups_of;

vox::quant::LinearTask linear_task(const vox::QuantProduct& product, int64_t rows, float* y) {
  return {product.format, product.packed, product.outputs, product.columns,
          reinterpret_cast<const int8_t*>(product.activations),
          product.activations + vox::quant::activation_codes_bytes(rows, product.columns), rows, y};
}
int64_t spans_of(int64_t rows) { return (rows + vox::quant::kRowsPerPart - 1) / vox::quant::kRowsPerPart; }
int64_t rows_of_part(int64_t rows) { return rows < vox::quant::kRowsPerPart ? rows : vox::quant::kRowsPerPart; }

// One group is read at some 10 bytes per nanosecond, and each row costs 32 operations a column at some 200.
int64_t part_nanoseconds(const vox::quant::LinearTask& task) {
  return task.columns * (16 + 2 * rows_of_part(task.rows)) / 16;
}

}  // namespace

namespace vox {
const QuantKernels& quant_kernels_in_use() { return kQuant.active(); }

int64_t run_gated(const QuantProduct& gate, const QuantProduct& up, bool is_silu, int64_t rows, float* out) {
  const quant::GatedTask task = {linear_task(gate, rows, nullptr), linear_task(up, rows, nullptr), is_silu, out};
  const int64_t gating = rows_of_part(rows) * quant::kGroupRows;
  return run({kQuant.active().gated, &task, spans_of(rows) * groups_of(gate.outputs),
              part_nanoseconds(task.gate) + part_nanoseconds(task.up) + gating});
}
}  // namespace vox

extern "C" {

int64_t vox_quant_packed_bytes(int32_t format, int64_t rows, int64_t columns) {
  if (!is_possible(format, rows, columns)) return -1;
  const vox::quant::Layout layout = vox::quant::layout_of(format);
  return groups_of(rows) * vox::quant::group_bytes(layout, columns / layout.block);
}

int64_t vox_quant_file_bytes(int32_t format, int64_t rows, int64_t columns) {
  if (!is_possible(format, rows, columns)) return -1;
  const vox::quant::Layout layout = vox::quant::layout_of(format);
  return rows * (columns / layout.block) * layout.file_bytes;
}

int64_t vox_quant_activation_bytes(int32_t block, int64_t rows, int64_t columns) {
  if ((block != 32 && block != 256) || rows <= 0 || columns <= 0 || columns % block != 0) return -1;
  return vox::quant::activation_bytes(block, rows, columns);
}

int64_t vox_quant_pack(int32_t format, const uint8_t* file, int64_t rows, int64_t columns, uint8_t* packed) {
  const vox::quant::PackTask task = {format, file, rows, columns, packed};
  return vox::run({vox::quant::pack_part, &task, groups_of(rows), columns * vox::quant::kGroupRows / 2});
}

int64_t vox_quant_activations(int32_t block, const float* x, int64_t rows, int64_t columns, uint8_t* activations) {
  const vox::quant::ActivationTask task = {block, x, rows, columns, reinterpret_cast<int8_t*>(activations),
                                           activations + vox::quant::activation_codes_bytes(rows, columns)};
  const int64_t panels = (rows + vox::quant::kPanelRows - 1) / vox::quant::kPanelRows;
  return vox::run({kQuant.active().activations, &task, panels, columns});
}

int64_t vox_quant_linear(int32_t format, const uint8_t* packed, int64_t outputs, int64_t columns,
                         const uint8_t* activations, int64_t rows, float* y) {
  const vox::quant::LinearTask task = linear_task({format, packed, outputs, columns, activations}, rows, y);
  vox::Work work(kQuant.active().linear, &task, spans_of(rows) * groups_of(outputs), part_nanoseconds(task));
  if (spans_of(rows) == 1) {
    const vox::quant::Layout layout = vox::quant::layout_of(format);
    work.reads(packed, vox::quant::group_bytes(layout, columns / layout.block));
  }
  return vox::run(work);
}

int64_t vox_quant_rows(int32_t format, const uint8_t* packed, int64_t rows, int64_t columns, const int32_t* ids,
                       int64_t count, float scale, float* out) {
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= rows) return VOX_OUT_OF_RANGE;
  const vox::quant::RowsTask task = {format, packed, rows, columns, ids, scale, out};
  return vox::run({vox::quant::rows_part, &task, count, columns * 2});
}
}
