// Gradients of parameters, example by example: a^T b over an example's rows, and the rows of a table.
#pragma once
#include "linear_backward.h"

namespace vox {
namespace VOX_ISA {

static int64_t example_products_scratch_bytes() {
  return (kProductTall * kProductWide + kProductTall * kChunk + kChunk * kBackwardWidth) * (int64_t)sizeof(float);
}

// [rows][columns] of `from` to [rows][kBackwardWidth], zeros to the right: a tile reads whole panels.
static void copy_panels(const float* from, int64_t stride, int64_t rows, int64_t columns, float* to) {
  for (int64_t i = 0; i < rows; ++i) {
    const float* row = from + i * stride;
    float* at = to + i * kBackwardWidth;
    int64_t c = 0;
    for (; c + kLanes <= columns; c += kLanes) f_store(at + c, f_load(row + c));
    if (c < columns) f_store(at + c, f_load_some(row + c, columns - c));
  }
}

// Sums of `tall` columns by `wide` columns of rows [begin, end), as [tall][kProductWide] in `sums`.
static void product_block(const ExampleProductsTask& task, int64_t begin, int64_t end, int64_t tall, int64_t tall_count,
                          int64_t wide, int64_t wide_count, float* sums) {
  float* left = sums + kProductTall * kProductWide;
  float* right = left + kProductTall * kChunk;
  for (int64_t i = begin; i < end; i += kChunk) {
    const int64_t count = i + kChunk < end ? kChunk : end - i;
    transpose(task.tall + i * task.tall_width + tall, task.tall_width, count, tall_count, left, kChunk);
    for (int64_t c = 0; c < wide_count; c += kBackwardWidth) {
      const int64_t columns = wide_count - c < kBackwardWidth ? wide_count - c : kBackwardWidth;
      const float* from = task.wide + i * task.wide_width + wide + c;
      // A low tile reads the rows once or twice: where they lie. A tall one, or an end, from a copy.
      const bool is_copied = tall_count > 4 * kTileRows || columns % kLanes != 0;
      if (is_copied) copy_panels(from, task.wide_width, count, columns, right);
      const F32Side side{is_copied ? right : from, is_copied ? kBackwardWidth : task.wide_width, kLanes};
      for (int64_t r = 0; r < tall_count; r += kTileRows)
        tile_rows(tall_count - r < kTileRows ? tall_count - r : kTileRows, (columns + kLanes - 1) / kLanes,
                  RowsLeft{left + r * kChunk, kChunk}, side, 0, 0, count, sums + r * kProductWide + c, kProductWide,
                  Start::zero, i == begin ? Finish::store : Finish::fold);
    }
  }
}

static int64_t example_products_part(const void* opaque, int64_t begin, int64_t end, void* scratch) {
  const auto& task = *static_cast<const ExampleProductsTask*>(opaque);
  auto* sums = static_cast<float*>(scratch);
  int64_t fault = 0;
  for (int64_t part = begin; part < end; ++part) {
    const int64_t wide = part % task.wide_parts * kProductWide;
    const int64_t tall = part / task.wide_parts % task.tall_parts * kProductTall;
    const int64_t example = part / task.wide_parts / task.tall_parts;
    const int64_t wide_count = task.wide_width - wide < kProductWide ? task.wide_width - wide : kProductWide;
    const int64_t tall_count = task.tall_width - tall < kProductTall ? task.tall_width - tall : kProductTall;
    const int64_t first = task.starts[example], last = task.starts[example + 1];
    if (first == last) __builtin_memset(sums, 0, kProductTall * kProductWide * sizeof(float));
    product_block(task, first, last, tall, tall_count, wide, wide_count, sums);
    float* out = task.out + example * task.tall_width * task.wide_width;
    bool finite = true;
    if (task.is_wide_first) {
      transpose(sums, kProductWide, tall_count, wide_count, out + wide * task.tall_width + tall, task.tall_width);
      for (int64_t r = 0; r < tall_count; ++r)
        for (int64_t c = 0; c < wide_count; ++c) finite = finite && is_finite(sums[r * kProductWide + c]);
    } else {
      for (int64_t r = 0; r < tall_count; ++r)
        finite = store_row(sums + r * kProductWide, wide_count, out + (tall + r) * task.wide_width + wide) && finite;
    }
    if (!finite && fault == 0) fault = 1 + example;
  }
  return fault;
}

// Adds a row of dy to an accumulator; all of a row, or its last lanes.
CANON void add_row(float* sum, const float* x, int64_t width) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) f_store(sum + i, f_add(f_load(sum + i), f_load(x + i)));
  for (; i < width; ++i) sum[i] = f_add(sum[i], x[i]);
}

// A part is a row of dy. The first row of an example with some token sums all rows with that token.
static int64_t embed_backward_part(const void* opaque, int64_t begin, int64_t end, void* scratch) {
  const auto& task = *static_cast<const EmbedBackwardTask*>(opaque);
  auto* chunk_sum = static_cast<float*>(scratch);
  int64_t fault = 0;
  for (int64_t r = begin; r < end; ++r) {
    const int32_t token = task.token_ids[r];
    const int64_t example = task.example_of[r];
    const int64_t first = task.starts[example], last = task.starts[example + 1];
    bool is_repeated = false;
    for (int64_t i = first; i < r && !is_repeated; ++i) is_repeated = task.token_ids[i] == token;
    if (is_repeated) continue;
    float* to = task.out + (example * task.table_rows + token) * task.width;
    bool is_started = false;
    for (int64_t chunk = first + (r - first) / kChunk * kChunk; chunk < last; chunk += kChunk) {
      const int64_t chunk_end = chunk + kChunk < last ? chunk + kChunk : last;
      // The first chunk's sum is the fold's beginning; each later one is added whole.
      float* sum = is_started ? chunk_sum : to;
      bool has_terms = false;
      for (int64_t i = chunk; i < chunk_end; ++i) {
        if (task.token_ids[i] != token) continue;
        if (!has_terms) __builtin_memset(sum, 0, (size_t)task.width * sizeof(float));
        has_terms = true;
        add_row(sum, task.dy + i * task.width, task.width);
      }
      if (has_terms && is_started) add_row(to, chunk_sum, task.width);
      is_started = is_started || has_terms;
    }
    bool finite = true;
    for (int64_t i = 0; i < task.width; ++i) finite = finite && is_finite(to[i]);
    if (!finite && (fault == 0 || 1 + example < fault)) fault = 1 + example;
  }
  return fault;
}

}  // namespace VOX_ISA
}  // namespace vox
