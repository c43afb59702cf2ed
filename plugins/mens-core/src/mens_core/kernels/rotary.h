// Cosine and sine of rotary angles, by integers alone: docs/numerics.md, RoPE.
#pragma once
#include "canon.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

using U128 = unsigned __int128;

static constexpr U128 u128(uint64_t high, uint64_t low) { return ((U128)high << 64) | low; }

// floor(a * b / 2^128)
CANON U128 mulhi(U128 a, U128 b) {
  const uint64_t a0 = (uint64_t)a, a1 = (uint64_t)(a >> 64), b0 = (uint64_t)b, b1 = (uint64_t)(b >> 64);
  const U128 low = (U128)a0 * b0, mid1 = (U128)a1 * b0, mid2 = (U128)a0 * b1;
  const U128 carry = (low >> 64) + (uint64_t)mid1 + (uint64_t)mid2;
  return (U128)a1 * b1 + (mid1 >> 64) + (mid2 >> 64) + (carry >> 64);
}

static constexpr U128 kTwoPi125 = u128(0xc90fdaa22168c234u, 0xc4c6628b80dc1cd1u);
static constexpr U128 kSineTerms[15] = {
    u128(0x2aaaaaaaaaaaaaaau, 0xaaaaaaaaaaaaaaaau), u128(0x0222222222222222u, 0x2222222222222222u),
    u128(0x000d00d00d00d00du, 0x00d00d00d00d00d0u), u128(0x00002e3bc74aad8eu, 0x671f5583911ca002u),
    u128(0x0000006b99159fd5u, 0x138e3f9d1f92e0dfu), u128(0x00000000b092309du, 0x43684be51c198e91u),
    u128(0x0000000000d73f9fu, 0x399dc0f88ec32b58u), u128(0x000000000000ca96u, 0x3b81856a53593028u),
    u128(0x0000000000000097u, 0xa4da340a0ab92650u), u128(0, 0x5c6e3bdb73d5c62fu),
    u128(0, 0x002ec368262c7033u),                   u128(0, 0x000013f3ccdd165fu),
    u128(0, 0x0000000746ac70b7u),                   u128(0, 0x00000000024b3f31u),
    u128(0, 0x000000000000a1a6u),
};
static constexpr U128 kCosineTerms[16] = {
    u128(0x8000000000000000u, 0),                   u128(0x0aaaaaaaaaaaaaaau, 0xaaaaaaaaaaaaaaaau),
    u128(0x005b05b05b05b05bu, 0x05b05b05b05b05b0u), u128(0x0001a01a01a01a01u, 0xa01a01a01a01a01au),
    u128(0x0000049f93edde27u, 0xd71cbbc05b4fa999u), u128(0x00000008f76c77fcu, 0x6c4bdaa26d4c3d67u),
    u128(0x000000000c9cba54u, 0x603e4e905d6f8a2eu), u128(0x00000000000d73f9u, 0xf399dc0f88ec32b5u),
    u128(0x0000000000000b41u, 0x3c31dcbecbbdd802u), u128(0x0000000000000007u, 0x950ae900808941eau),
    u128(0, 0x04338e5b6dfe14a5u),                   u128(0, 0x0001f2cf01972f57u),
    u128(0, 0x000000c4742fe352u),                   u128(0, 0x0000000042862898u),
    u128(0, 0x000000000013932cu),                   u128(0, 0x000000000000050du),
};

// z (t1 - z (t2 - z (t3 - ...))), each product floored.
template <int N>
static U128 alternating(const U128 (&terms)[N], U128 z) {
  U128 h = 0;
  for (int k = N - 1; k >= 0; --k) h = mulhi(z, terms[k] - h);
  return h;
}

// The float32 nearest to (carry * 2^128 + magnitude) * factor / 2^192, where carry is a 129th bit.
static float round_scaled(U128 magnitude, bool carry, U128 factor, bool negative) {
  // The product in four 64-bit limbs; factor is below 2^67.
  const uint64_t m0 = (uint64_t)magnitude, m1 = (uint64_t)(magnitude >> 64);
  const uint64_t f0 = (uint64_t)factor, f1 = (uint64_t)(factor >> 64);
  const U128 p00 = (U128)m0 * f0, p01 = (U128)m0 * f1, p10 = (U128)m1 * f0, p11 = (U128)m1 * f1;
  const U128 middle = (p00 >> 64) + (uint64_t)p01 + (uint64_t)p10;
  const U128 upper = p11 + (p01 >> 64) + (p10 >> 64) + (middle >> 64) + (carry ? factor : 0);
  const uint64_t limbs[4] = {(uint64_t)p00, (uint64_t)middle, (uint64_t)upper, (uint64_t)(upper >> 64)};

  int top = 3;
  while (top >= 0 && limbs[top] == 0) --top;
  if (top < 0) return 0.0f;
  const int length = 64 * top + 64 - __builtin_clzll(limbs[top]);
  const int excess = length - 24;  // bits below the 24 kept ones
  int exponent = excess - 192 + 23 + 127;
  if (exponent < 0) return 0.0f;  // far below 2^-126; excess is positive from here on
  uint64_t kept = limbs[excess / 64] >> (excess % 64);
  if (excess % 64 != 0 && excess / 64 < 3) kept |= limbs[excess / 64 + 1] << (64 - excess % 64);
  kept &= 0xFFFFFF;
  const int half = excess - 1;
  const bool half_bit = (limbs[half / 64] >> (half % 64)) & 1;
  bool rest = (limbs[half / 64] & (((uint64_t)1 << (half % 64)) - 1)) != 0;
  for (int i = 0; i < half / 64; ++i) rest = rest || limbs[i] != 0;
  if (half_bit && (rest || (kept & 1))) ++kept;
  if (kept >> 24) {
    kept >>= 1;
    ++exponent;
  }
  if (exponent < 1) return 0.0f;
  return f_from((int32_t)(((uint32_t)negative << 31) | ((uint32_t)exponent << 23) | (uint32_t)(kept & 0x7FFFFF)));
}

static void rotary_angle(U128 frequency, uint64_t position, U128 factor, float* cosine, float* sine) {
  const U128 angle = frequency * position;  // modulo one turn by the type's width
  const int octant = (int)(angle >> 125);
  U128 rest = angle & (((U128)1 << 125) - 1);
  if (octant % 2 == 1) rest = ((U128)1 << 125) - rest;
  const U128 x = 2 * mulhi(4 * rest, kTwoPi125);
  const U128 z = mulhi(x, x);
  const U128 s = x - mulhi(x, alternating(kSineTerms, z));
  const U128 h = alternating(kCosineTerms, z);
  const U128 k = (U128)0 - h;
  const bool k_is_one = h == 0;
  const bool exchanged = octant == 1 || octant == 2 || octant == 5 || octant == 6;
  const bool negative_cosine = octant >= 2 && octant <= 5;
  const bool negative_sine = octant >= 4;
  if (exchanged) {
    *cosine = round_scaled(s, false, factor, negative_cosine);
    *sine = round_scaled(k, k_is_one, factor, negative_sine);
  } else {
    *cosine = round_scaled(k, k_is_one, factor, negative_cosine);
    *sine = round_scaled(s, false, factor, negative_sine);
  }
}

static int64_t rotary_part(const void* task, int64_t begin, int64_t end, void*) {
  const auto& rotary = *static_cast<const RotaryTask*>(task);
  const U128 factor = u128(rotary.factor_high, rotary.factor_low);
  for (int64_t p = begin; p < end; ++p) {
    float* cosines = rotary.table + p * 2 * rotary.pairs;
    for (int64_t i = 0; i < rotary.pairs; ++i)
      rotary_angle(u128(rotary.frequencies[2 * i + 1], rotary.frequencies[2 * i]),
                   (uint64_t)(rotary.first_position + p), factor, cosines + i, cosines + rotary.pairs + i);
  }
  return 0;
}

}  // namespace VOX_ISA
}  // namespace vox
