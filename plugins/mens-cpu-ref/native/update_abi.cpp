// The C ABI of loss, gradients of parameters and update: shapes checked, a task for the pool out.
#include <string.h>

#include <new>
#include <vector>

#include "update_abi.h"
#include "quant_formats.h"
#include "update_kernels.h"
#include "update_tasks.h"

namespace {

using namespace vox;

const PerIsa<UpdateKernels> kUpdate = {{
#if defined(VOX_HAS_AVX2)
    &avx2::update_kernels, &avx512::update_kernels, nullptr,
#else
    nullptr, nullptr, &neon::update_kernels,
#endif
}};

constexpr uint32_t kDropoutStream = 4;
constexpr int64_t kMostDropoutWidth = int64_t{1} << 18;

int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

bool do_starts_ascend(const int32_t* starts, int64_t examples) {
  if (starts[0] != 0) return false;
  for (int64_t e = 0; e < examples; ++e)
    if (starts[e] > starts[e + 1]) return false;
  return true;
}

int64_t run_linear_backward(bool is_quantised, int32_t format, const void* packed, int64_t outputs, int64_t inputs,
                            const float* dy, int64_t rows, float* out) {
  if (rows == 0) return 0;
  const UpdateKernels& kernels = kUpdate.active();
  const int64_t groups = parts_of(inputs, kernels.backward_width);
  // Unpacking costs as much as some tens of rows, so a part takes many; few groups are cut by rows as well.
  int64_t rows_per_part = rows < 512 ? rows : 512;
  while (groups * parts_of(rows, rows_per_part) < 2 * threads() && rows_per_part > 96)
    rows_per_part = parts_of(rows_per_part, 2);
  const LinearBackwardTask task{is_quantised, format, packed, outputs, inputs, dy, out,
                                rows, rows_per_part, parts_of(rows, rows_per_part)};
  const int64_t products = outputs * kernels.backward_width * (rows_per_part + 24);
  return run({kernels.linear_backward, &task, groups * task.row_parts, products / 24,
              kernels.linear_backward_scratch_bytes(rows_per_part)});
}

int64_t run_elementwise(Part part, const ElementwiseTask& task, int64_t nanoseconds_per_part) {
  return run({part, &task, parts_of(task.elements, kElementsPerPart), nanoseconds_per_part});
}

}  // namespace

extern "C" {

int64_t vox_linear_backward(int32_t format, const void* packed, int64_t outputs, int64_t inputs, const float* dy,
                            int64_t rows, float* out) {
  return run_linear_backward(false, format, packed, outputs, inputs, dy, rows, out);
}

int64_t vox_quant_linear_backward(int32_t format, const void* packed, int64_t outputs, int64_t inputs,
                                  const float* dy, int64_t rows, float* out) {
  return run_linear_backward(true, format, packed, outputs, inputs, dy, rows, out);
}

int64_t vox_embed_backward(const float* dy, const int32_t* token_ids, const int32_t* starts, int64_t examples,
                           int64_t table_rows, int64_t width, float* out) {
  if (!do_starts_ascend(starts, examples)) return VOX_OUT_OF_RANGE;
  const int64_t rows = starts[examples];
  for (int64_t r = 0; r < rows; ++r)
    if (token_ids[r] < 0 || token_ids[r] >= table_rows) return VOX_OUT_OF_RANGE;
  try {
    std::vector<int32_t> example_of(static_cast<size_t>(rows));
    for (int64_t e = 0; e < examples; ++e)
      for (int64_t r = starts[e]; r < starts[e + 1]; ++r) example_of[static_cast<size_t>(r)] = static_cast<int32_t>(e);
    const EmbedBackwardTask task{dy, token_ids, starts, example_of.data(), out, table_rows, width};
    return run({kUpdate.active().embed_backward, &task, rows, width + rows / 4,
                width * static_cast<int64_t>(sizeof(float))});
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
}

int64_t vox_example_products(const float* a, const float* b, const int32_t* starts, int64_t examples, int64_t a_width,
                             int64_t b_width, float* out) {
  if (!do_starts_ascend(starts, examples)) return VOX_OUT_OF_RANGE;
  const UpdateKernels& kernels = kUpdate.active();
  const bool is_wide_first = a_width > b_width;
  ExampleProductsTask task{is_wide_first ? b : a, is_wide_first ? a : b, starts, out,
                           is_wide_first ? b_width : a_width, is_wide_first ? a_width : b_width, 0, 0, is_wide_first};
  task.tall_parts = parts_of(task.tall_width, kProductTall);
  task.wide_parts = parts_of(task.wide_width, kProductWide);
  const int64_t parts = examples * task.tall_parts * task.wide_parts;
  const int64_t products = a_width * b_width * starts[examples] / (parts > 0 ? parts : 1);
  return run({kernels.example_products, &task, parts, products / 24, kernels.example_products_scratch_bytes()});
}

int64_t vox_cross_entropy(const float* logits, const int32_t* targets, int64_t rows, int64_t width, float* losses,
                          float* gradients) {
  for (int64_t r = 0; r < rows; ++r)
    if (targets[r] < 0 || targets[r] >= width) return VOX_OUT_OF_RANGE;
  const CrossEntropyTask task{logits, targets, width, losses, gradients};
  return run({kUpdate.active().cross_entropy, &task, rows, width * 2});
}

int64_t vox_example_sums(const float* losses, const int32_t* positions, const int32_t* starts, int64_t examples,
                         float* out) {
  if (!do_starts_ascend(starts, examples)) return VOX_OUT_OF_RANGE;
  for (int64_t e = 0; e < examples; ++e)
    for (int64_t i = starts[e]; i < starts[e + 1]; ++i)
      if (positions[i] < 0 || (i > starts[e] && positions[i] <= positions[i - 1])) return VOX_OUT_OF_RANGE;
  const ExampleSumsTask task{losses, positions, starts, out};
  return run({kUpdate.active().example_sums, &task, examples, 2 * starts[examples] / (examples + 1)});
}

int64_t vox_scale(const float* x, int64_t rows, int64_t width, float factor, float* out) {
  return run_elementwise(kUpdate.active().scale, {x, nullptr, out, rows * width, width, factor}, 120);
}

int64_t vox_add_scaled(const float* y, const float* x, int64_t rows, int64_t width, float factor, float* out) {
  return run_elementwise(kUpdate.active().add_scaled, {y, x, out, rows * width, width, factor}, 150);
}

int64_t vox_dropout(const float* x, const int32_t* positions, const int32_t* examples, int64_t rows, int64_t width,
                    uint64_t seed, uint32_t step, uint32_t layer, uint32_t threshold, float factor, float* out) {
  if (width > kMostDropoutWidth || layer >> 16 != 0) return VOX_OUT_OF_RANGE;
  for (int64_t r = 0; r < rows; ++r)
    if (positions[r] < 0 || examples[r] < 0 || examples[r] >> 16 != 0) return VOX_OUT_OF_RANGE;
  const DropoutTask task{x, positions, examples, width, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                         kDropoutStream | layer << 16, step, threshold, factor, out};
  return run({kUpdate.active().dropout, &task, rows, width * 2});
}

int64_t vox_sum_of_squares(const float* x, int64_t elements, float* out) {
  const SquaresTask task{x, elements, out};
  return run({kUpdate.active().sum_of_squares, &task, 1, elements});
}

int64_t vox_adamw(float* parameter, const float* gradient, float* m, float* v, int64_t rows, int64_t width,
                  const float* constants) {
  AdamWTask task{parameter, gradient, m, v, rows * width, width, {}};
  static_assert(sizeof(task.by) == 9 * sizeof(float));
  memcpy(&task.by, constants, sizeof(task.by));
  return run({kUpdate.active().adamw, &task, parts_of(task.elements, kElementsPerPart), 1500});
}
}
