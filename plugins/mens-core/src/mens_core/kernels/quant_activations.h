// Activations to int8: d = amax / 127, q = rint(x * (127 / amax)), block by block.
//
// Four rows at a time, by vectors; what is left of the rows by scalar loops. Nothing here is a float reduction, so
// either way each value goes through the same operations.
#pragma once
#include "definitions.h"
#include "quant_formats.h"
#include "quant_simd.h"

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
  int32_t sums[16];
  for (int i = 0; i < 16; ++i) sums[i] = sum_codes<16>(q + 16 * i);
  for (int i = 0; i < 8; ++i) out.sum32[i] = (int16_t)(sums[2 * i] + sums[2 * i + 1]);
  for (int i = 0; i < 16; ++i) out.start16[i] = -32 * sums[i];
}

// activation_code of sixteen values.
CANON VI activation_codes(VF x, VF inverse) {
  return i_sub(f_bits(f_add(f_mul(x, inverse), f_splat(f_from(0x4B400000)))), i_splat(0x4B400000));
}

// What is kept of a block of four rows beside its codes: their scales, and the sums of `lanes`: of 16 columns each, by
// four columns and row.
CANON void sum_rows(const int32_t* lanes, int32_t* sums) {
  for (int r = 0; r < 4; ++r) sums[r] = lanes[r] + lanes[4 + r] + lanes[8 + r] + lanes[12 + r];
}
CANON void describe_four(quant::Block32* out, const float* d, const int32_t (*lanes)[kLanes]) {
  int32_t first[4], second[4];
  sum_rows(lanes[0], first);
  sum_rows(lanes[1], second);
  for (int r = 0; r < 4; ++r) out[r] = {d[r], -(first[r] + second[r])};
}
CANON void describe_four(quant::Block256* out, const float* d, const int32_t (*lanes)[kLanes]) {
  int32_t sums[16][4];
  for (int i = 0; i < 16; ++i) sum_rows(lanes[i], sums[i]);
  for (int r = 0; r < 4; ++r) {
    out[r].d = d[r];
    for (int i = 0; i < 8; ++i) out[r].sum32[i] = (int16_t)(sums[2 * i][r] + sums[2 * i + 1][r]);
    for (int i = 0; i < 16; ++i) out[r].start16[i] = -32 * sums[i][r];
  }
}

// A whole panel. The divisions of several blocks are done side by side.
template <int N, class Block>
static void quantise_four(const quant::ActivationTask& task, int64_t panel) {
  constexpr int side = N == 32 ? 4 : 1, steps = N / kLanes;
  const int64_t first = panel * quant::kPanelRows, blocks = task.columns / N;
  const float* x = task.x + first * task.columns;
  int8_t* codes = task.codes + first * task.columns;
  auto* block = static_cast<Block*>(task.blocks) + first * blocks;
  for (int64_t b = 0; b < blocks; b += side) {
    const int count = blocks - b < side ? (int)(blocks - b) : side;
    int32_t top[4 * side] = {};
    float d[4 * side], inverse[4 * side];
    for (int j = 0; j < count; ++j)
      for (int r = 0; r < 4; ++r) {
        const float* from = x + r * task.columns + (b + j) * N;
        VI most = i_splat(0);
        for (int i = 0; i < steps; ++i) most = i_max(most, i_and(f_bits(f_load(from + i * kLanes)), i_splat(0x7FFFFFFF)));
        top[4 * j + r] = i_most(most);
      }
    for (int i = 0; i < 4 * side; ++i) d[i] = activation_scale(top[i]);
    for (int i = 0; i < 4 * side; ++i) inverse[i] = activation_inverse(top[i]);
    for (int j = 0; j < count; ++j, block += 4) {
      int32_t lanes[steps][kLanes];
      for (int i = 0; i < steps; ++i, codes += 4 * kLanes) {
        VI q[4];
        for (int r = 0; r < 4; ++r) {
          const float* from = x + r * task.columns + (b + j) * N + i * kLanes;
          q[r] = has_codes(d[4 * j + r]) ? activation_codes(f_load(from), f_splat(inverse[4 * j + r])) : i_splat(0);
        }
        const Bytes packed = pack_codes(q[0], q[1], q[2], q[3]);
        store_bytes(codes, packed);
        i_store(lanes[i], sums_of_four(packed));
      }
      describe_four(block, d + 4 * j, lanes);
    }
  }
}

// A panel of any number of rows.
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
    const bool is_whole = (panel + 1) * quant::kPanelRows <= task.rows;
    if (is_whole && task.block == 32) quantise_four<32, quant::Block32>(task, panel);
    else if (is_whole) quantise_four<256, quant::Block256>(task, panel);
    else if (task.block == 32) quantise_panel<32, quant::Block32>(task, panel);
    else quantise_panel<256, quant::Block256>(task, panel);
  }
  return 0;
}

}  // namespace VOX_ISA
}  // namespace vox
