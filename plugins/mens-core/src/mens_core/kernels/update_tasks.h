// What the kernels of loss, parameter gradients and update are told: plain data, as in tasks.h.
#pragma once
#include "tasks.h"

namespace vox {

struct LinearBackwardTask {  // parts are (group of columns, block of rows), rows fastest
  bool is_quantised;
  int32_t format;      // of tasks.h, or of quant_formats.h
  const void* packed;  // [outputs, inputs]
  int64_t outputs, inputs;
  const float* dy;  // [rows, outputs]
  float* out;       // [rows, inputs]
  int64_t rows, rows_per_part, row_parts;
};

// Per example, the product of two matrices over their rows. One side's columns lie in vector
// lanes (`wide`), the other's are the rows of a tile (`tall`): a product knows no left and right.
struct ExampleProductsTask {  // parts are (example, block of tall, block of wide), wide fastest
  const float* tall;
  const float* wide;
  const int32_t* starts;
  float* out;  // [examples, tall, wide], or [examples, wide, tall]
  int64_t tall_width, wide_width;
  int64_t tall_parts, wide_parts;
  bool is_wide_first;  // of `out`
};
constexpr int64_t kProductTall = 48;   // of a part: a multiple of every tile's height
constexpr int64_t kProductWide = 512;  // of a part: a multiple of every tile's width

struct EmbedBackwardTask {  // parts are rows of dy
  const float* dy;
  const int32_t* token_ids;
  const int32_t* starts;
  const int32_t* example_of;  // of each row
  float* out;                 // [examples, table_rows, width], zero
  int64_t table_rows, width;
};

struct CrossEntropyTask {  // parts are rows
  const float* logits;
  const int32_t* targets;
  int64_t width;
  float* losses;
  float* gradients;
};

struct ExampleSumsTask {  // parts are examples
  const float* losses;
  const int32_t* positions;
  const int32_t* starts;
  float* out;
};

struct DropoutTask {  // parts are rows
  const float* x;
  const int32_t* positions;
  const int32_t* examples;
  int64_t width;
  uint32_t seed_low, seed_high, stream, step;  // key; words 2 and 3 of the counter
  uint32_t threshold;                          // a word below it drops its element
  float factor;
  float* out;
};

struct SquaresTask {  // one part
  const float* x;
  int64_t elements;
  float* out;
};

// In the order of the array that the ABI takes.
struct AdamWConstants {
  float learning_rate, beta1, one_minus_beta1, beta2, one_minus_beta2, eps, decay, correction1, correction2;
};

struct AdamWTask {  // parts as elementwise
  float* parameter;
  const float* gradient;
  float* m;
  float* v;
  int64_t elements, width;
  AdamWConstants by;
};

}  // namespace vox
