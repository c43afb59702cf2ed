// Activations to int8: d = amax / 127, q = rint(x * (127 / amax)), block by block.
//
// Scalar loops without a float reduction, so a compiler may vectorise them and change no bit.
#pragma once
#include "canon.h"
#include "quant_formats.h"

namespace vox {
namespace VOX_ISA {

// Adding 1.5 * 2^23 rounds |v| < 2^22 to an integer, ties to even, and leaves it in the low bits.
constexpr float kRoundMagic = 12582912.0f;
constexpr int32_t kRoundBits = 0x4B400000;

// Writes N codes and returns the scale. A block that is not finite gets a NaN scale: every output
// that it touches becomes NaN, and the operator reports the row.
template <int N>
CANON float quantise_block(const float* x, int8_t* q) {
  int32_t top = 0;  // the largest magnitude, as bits
  for (int i = 0; i < N; ++i) {
    const int32_t magnitude = f_bits(x[i]) & 0x7FFFFFFF;
    top = magnitude > top ? magnitude : top;
  }
  const float amax = f_from(top);
  const float d = f_div(amax, 127.0f);
  if (top >= 0x7F800000 || !(d > 0.0f)) {
    __builtin_memset(q, 0, N);
    return top >= 0x7F800000 ? f_from(0x7FC00000) : 0.0f;
  }
  const float id = f_div(127.0f, amax);
  for (int i = 0; i < N; ++i) q[i] = (int8_t)(f_bits(f_add(f_mul(x[i], id), kRoundMagic)) - kRoundBits);
  return d;
}

template <int N>
CANON int32_t sum_codes(const int8_t* q) {
  int32_t sum = 0;
  for (int i = 0; i < N; ++i) sum += q[i];
  return sum;
}

static int64_t quantise_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const quant::ActivationTask*>(opaque);
  const int64_t blocks = task.columns / task.block;
  for (int64_t b = begin * blocks; b < end * blocks; ++b) {
    const float* x = task.x + b * task.block;
    int8_t* q = task.codes + b * task.block;
    if (task.block == 32) {
      auto& out = static_cast<quant::Block32*>(task.blocks)[b];
      out.d = quantise_block<32>(x, q);
      out.sum = sum_codes<32>(q);
      continue;
    }
    auto& out = static_cast<quant::Block256*>(task.blocks)[b];
    out.d = quantise_block<256>(x, q);
    for (int i = 0; i < 16; ++i) out.sum16[i] = sum_codes<16>(q + 16 * i);
    for (int i = 0; i < 8; ++i) out.sum32[i] = (int16_t)(out.sum16[2 * i] + out.sum16[2 * i + 1]);
  }
  return 0;
}

}  // namespace VOX_ISA
}  // namespace vox
