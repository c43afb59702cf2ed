// Activations to int8: d = amax / 127, q = rint(x * (127 / amax)), block by block.
//
// Scalar loops without a float reduction, so a compiler may vectorise them and change no bit.
#pragma once
#include "definitions.h"
#include "quant_formats.h"

namespace vox {
namespace VOX_ISA {

// Writes N codes and returns the scale. A block that is not finite gets a NaN scale: every output
// that it touches becomes NaN, and the operator reports the row.
template <int N>
CANON float quantise_block(const float* x, int8_t* q) {
  int32_t top = 0;  // the largest magnitude, as bits
  for (int i = 0; i < N; ++i) {
    const int32_t magnitude = f_bits(x[i]) & 0x7FFFFFFF;
    top = magnitude > top ? magnitude : top;
  }
  const float d = activation_scale(top);
  if (!has_codes(d)) {
    __builtin_memset(q, 0, N);
    return d;
  }
  const float inverse = activation_inverse(top);
  for (int i = 0; i < N; ++i) q[i] = (int8_t)activation_code(x[i], inverse);
  return d;
}

template <int N>
CANON int32_t sum_codes(const int8_t* q) {
  int32_t sum = 0;
  for (int i = 0; i < N; ++i) sum += q[i];
  return sum;
}

CANON void describe(quant::Block32& out, float d, const int8_t* q) {
  out.d = d;
  out.negative_sum = -sum_codes<32>(q);
}
CANON void describe(quant::Block256& out, float d, const int8_t* q) {
  out.d = d;
  for (int i = 0; i < 16; ++i) out.negative_sum16[i] = -sum_codes<16>(q + 16 * i);
  for (int i = 0; i < 8; ++i) out.sum32[i] = (int16_t)-(out.negative_sum16[2 * i] + out.negative_sum16[2 * i + 1]);
}

template <int N, class Block>
static void quantise_panel(const quant::ActivationTask& task, int64_t panel) {
  const int64_t first = panel * quant::kPanelRows, blocks = task.columns / N;
  const int64_t width = task.rows - first < quant::kPanelRows ? task.rows - first : quant::kPanelRows;
  for (int64_t r = 0; r < width; ++r) {
    const float* x = task.x + (first + r) * task.columns;
    int8_t* codes = task.codes + first * task.columns + 4 * r;
    auto* block = static_cast<Block*>(task.blocks) + first * blocks + r;
    for (int64_t b = 0; b < blocks; ++b, block += width) {
      int8_t q[N];
      const float d = quantise_block<N>(x + b * N, q);
      describe(*block, d, q);
      for (int g = 0; g < N / 4; ++g, codes += 4 * width) __builtin_memcpy(codes, q + 4 * g, 4);
    }
  }
}

static int64_t quantise_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::ActivationTask*>(opaque);
  for (int64_t panel = begin; panel < end; ++panel) {
    if (task.block == 32) quantise_panel<32, quant::Block32>(task, panel);
    else quantise_panel<256, quant::Block256>(task, panel);
  }
  return 0;
}

}  // namespace VOX_ISA
}  // namespace vox
