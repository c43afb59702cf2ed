// dX = dY W: a sum over the rows of W, so that W is turned on its way from the packed form.
//
// A part unpacks 128 rows by a group of columns into scratch and multiplies all its rows of dY by
// that; the whole of a dequantised weight never exists.
#pragma once
#include "tile.h"
#include "transpose.h"
#include "update_tasks.h"
#include "weight_runs.h"

namespace vox {
namespace VOX_ISA {

constexpr int64_t kBackwardWidth = (kTilePanels > 2 ? kTilePanels : 2) * kLanes;  // columns of a part

static int64_t linear_backward_scratch_bytes(int64_t rows_per_part) {
  return ((rows_per_part + kChunk) * kBackwardWidth + kRun * kLanes) * (int64_t)sizeof(float);
}

// Rows [first, last) of W, columns [column, column + columns), to [last - first][kBackwardWidth].
template <class Runs>
static void unpack_rows(const Runs& weight, int64_t first, int64_t last, int64_t column, int64_t columns, float* to,
                        float* run) {
  for (int64_t n = first; n < last; n += kLanes)
    for (int64_t c = 0; c < columns; c += kRun) {
      const float* from = weight.read(n / kLanes, column + c, columns - c, run);
      float* at = to + (n - first) * kBackwardWidth + c;
      for (int64_t i = 0; i < kRun; i += 4)
        for (int64_t j = 0; j < kLanes; j += 4)
          transpose_four(from + i * kLanes + j, kLanes, at + j * kBackwardWidth + i, kBackwardWidth);
    }
}

// Copies a tile's rows to where they belong and returns whether all was finite.
static bool store_row(const float* from, int64_t columns, float* to) {
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
  return finite;
}

template <class Runs>
static int64_t linear_backward_parts(const LinearBackwardTask& task, const Runs& weight, int64_t begin, int64_t end,
                                     float* scratch) {
  float* unpacked = scratch + task.rows_per_part * kBackwardWidth;
  float* run = unpacked + kChunk * kBackwardWidth;
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t column = part / task.row_parts * kBackwardWidth;
    const int64_t first = part % task.row_parts * task.rows_per_part;
    const int64_t last = first + task.rows_per_part < task.rows ? first + task.rows_per_part : task.rows;
    const int64_t columns = task.inputs - column < kBackwardWidth ? task.inputs - column : kBackwardWidth;
    const int64_t panels = (columns + kLanes - 1) / kLanes;
    const F32Side side{unpacked, kBackwardWidth, kLanes};
    for (int64_t n = 0; n < task.outputs; n += kChunk) {
      const int64_t n_end = n + kChunk < task.outputs ? n + kChunk : task.outputs;
      unpack_rows(weight, n, n_end, column, columns, unpacked, run);
      for (int64_t r = first; r < last; r += kTileRows)
        tile_rows(last - r < kTileRows ? last - r : kTileRows, panels,
                  RowsLeft{task.dy + r * task.outputs + n, task.outputs}, side, 0, 0, n_end - n,
                  scratch + (r - first) * kBackwardWidth, kBackwardWidth, Start::zero,
                  n == 0 ? Finish::store : Finish::fold);
    }
    for (int64_t r = first; r < last; ++r) {
      const bool finite =
          store_row(scratch + (r - first) * kBackwardWidth, columns, task.out + r * task.inputs + column);
      if (!finite && (fault == 0 || 1 + r < fault)) fault = 1 + r;
    }
  }
  return fault;
}

static int64_t linear_backward_part(const void* opaque, int64_t begin, int64_t end, void* scratch) {
  const auto& task = *static_cast<const LinearBackwardTask*>(opaque);
  auto* memory = static_cast<float*>(scratch);
  const int64_t stride = task.inputs * kLanes;
#define VOX_BACKWARD(...) return linear_backward_parts(task, __VA_ARGS__, begin, end, memory)
#define VOX_BACKWARD_QUANT(F) VOX_BACKWARD(QuantisedRuns<F>(task.packed, task.format, task.outputs, task.inputs))
  if (!task.is_quantised) {
    const auto* halves = static_cast<const uint16_t*>(task.packed);
    switch (static_cast<Format>(task.format)) {
      case Format::f32: VOX_BACKWARD(FloatRuns<F32Side>{{static_cast<const float*>(task.packed), kLanes, stride}});
      case Format::f16: VOX_BACKWARD(FloatRuns<F16Side>{{halves, kLanes, stride}});
      case Format::bf16: VOX_BACKWARD(FloatRuns<Bf16Side>{{halves, kLanes, stride}});
      default: VOX_BACKWARD(CompactRuns{CompactMatrix(task.packed, task.outputs, task.inputs)});
    }
  }
  switch (task.format) {
    case quant::kQ8_0: VOX_BACKWARD_QUANT(Of32<RunQ8_0>);
    case quant::kQ5_0: VOX_BACKWARD_QUANT(Of32<RunQ5_0>);
    case quant::kQ4_0: VOX_BACKWARD_QUANT(Of32<RunQ4_0>);
    case quant::kQ4_K: VOX_BACKWARD_QUANT(Of256<RunQ4_K>);
    case quant::kQ5_K: VOX_BACKWARD_QUANT(Of256<RunQ5_K>);
    case quant::kQ8_0Upper: VOX_BACKWARD_QUANT(Of32<RunQ8_0Halves>);
    default: VOX_BACKWARD_QUANT(Of256<RunQ6_K>);
  }
#undef VOX_BACKWARD_QUANT
#undef VOX_BACKWARD
}

}  // namespace VOX_ISA
}  // namespace vox
