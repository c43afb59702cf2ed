// What the scalar reference's files share: elementary functions and the one order of a sum
// (docs/numerics.md, sections 2 and 3). Includes nothing of the kernel source.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace vox_reference {

inline float from_bits(uint32_t bits) {
  float a;
  memcpy(&a, &bits, 4);
  return a;
}

inline uint32_t to_bits(float a) {
  uint32_t bits;
  memcpy(&bits, &a, 4);
  return bits;
}

inline bool is_finite(float a) { return (to_bits(a) & 0x7F800000u) != 0x7F800000u; }

// 0, or 1 + the first row with a value that is not finite.
inline int64_t first_fault(const float* out, int64_t rows, int64_t width) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; ++i)
      if (!is_finite(out[r * width + i])) return 1 + r;
  return 0;
}

// --- elementary functions ------------------------------------------------------------------

inline float ref_exp(float x) {
  if (x < -87.0f) return 0.0f;
  const float log2e = from_bits(0x3FB8AA3B), magic = from_bits(0x4B400000);
  const float ln2_high = from_bits(0x3F317200), ln2_low = from_bits(0x35BFBE8E);
  const float n = fmaf(x, log2e, magic) - magic;
  float r = fmaf(n, -ln2_high, x);
  r = fmaf(n, -ln2_low, r);
  float p = from_bits(0x3AB5639D);
  p = fmaf(p, r, from_bits(0x3C091EF0));
  p = fmaf(p, r, from_bits(0x3D2AAC2C));
  p = fmaf(p, r, from_bits(0x3E2AAA46));
  p = fmaf(p, r, from_bits(0x3EFFFFFE));
  p = fmaf(p, r, 1.0f);
  p = fmaf(p, r, 1.0f);
  // p * 2^n by adding n to the exponent; the caller's NaN stays one.
  if (p != p) return p;
  return from_bits(to_bits(p) + (static_cast<uint32_t>(static_cast<int32_t>(n)) << 23));
}

inline float ref_log(float x) {
  // x = 2^e * m, sqrt(1/2) <= m < sqrt(2)
  const int32_t bits = static_cast<int32_t>(to_bits(x));
  const int32_t above = bits - 0x3F3504F3;
  const int32_t e = above >= 0 ? above / 0x800000 : -((0x7FFFFF - above) / 0x800000);
  const float m = from_bits(static_cast<uint32_t>(bits - e * 0x800000));
  const float n = static_cast<float>(e);
  const float f = m - 1.0f;
  const float z = f * f;
  float p = from_bits(0x3D5AC715);
  p = fmaf(p, f, from_bits(0xBDDF91EC));
  p = fmaf(p, f, from_bits(0x3DF7F82E));
  p = fmaf(p, f, from_bits(0xBE0081F1));
  p = fmaf(p, f, from_bits(0x3E1181B7));
  p = fmaf(p, f, from_bits(0xBE2A978C));
  p = fmaf(p, f, from_bits(0x3E4CD2A0));
  p = fmaf(p, f, from_bits(0xBE800038));
  p = fmaf(p, f, from_bits(0x3EAAAAA4));
  const float cubic = z * f;
  float t = cubic * p;
  t = fmaf(n, from_bits(0x35BFBE8E), t);
  t = fmaf(z, -0.5f, t);
  t = f + t;
  return fmaf(n, from_bits(0x3F317200), t);
}

inline float at_most_88(float x) { return x < 88.0f ? x : 88.0f; }

inline float ref_silu(float x) {
  const float e = ref_exp(at_most_88(-x));
  const float d = 1.0f + e;
  return x / d;
}

inline float ref_gelu(float x) {
  const float z = x * x;
  const float w = fmaf(z, from_bits(0xBD922279), from_bits(0xBFCC422A));
  const float minus_2u = x * w;
  const float e = ref_exp(at_most_88(minus_2u));
  const float d = 1.0f + e;
  return x / d;
}

inline float ref_tanh(float x) {
  const float a = fabsf(x);
  float y;
  if (a < 0.625f) {
    const float z = a * a;
    float p = from_bits(0xBBBA8671);
    p = fmaf(p, z, from_bits(0x3CA8FC67));
    p = fmaf(p, z, from_bits(0xBD5C1AD2));
    p = fmaf(p, z, from_bits(0x3E08837B));
    p = fmaf(p, z, from_bits(0xBEAAAA99));
    const float pz = p * z;
    y = fmaf(pz, a, a);
  } else {
    const float minus_2a = a * -2.0f;
    const float e = ref_exp(minus_2a);
    const float above = 1.0f - e;
    const float below = 1.0f + e;
    y = above / below;
  }
  return copysignf(y, x);
}

inline float capped(float x, float cap) {
  const float ratio = x / cap;
  const float t = ref_tanh(ratio);
  return cap * t;
}

// --- sums ------------------------------------------------------------------------------------

// C128 of a[k] * b[k]: chunks of 128, a chain of fma from +0 in each, chunks added in order.
inline float c128(const float* a, const float* b, int64_t count) {
  float y = 0.0f;
  for (int64_t chunk = 0; chunk < count; chunk += 128) {
    float p = 0.0f;
    for (int64_t k = chunk; k < count && k < chunk + 128; ++k) p = fmaf(a[k], b[k], p);
    y = chunk == 0 ? p : y + p;
  }
  return y;
}

}  // namespace vox_reference
