// Quantised weights as they lie in the file (docs/numerics.md, 10.1): codes and scales of one block.
#pragma once
#include "../definitions.h"
#include "args.h"

namespace vox {
namespace VOX_ISA {

typedef VOX_DEVICE const uint8_t* BlockBytes;

CANON uint32_t two_bytes(BlockBytes p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8; }
CANON float half_at(BlockBytes p) { return f16_to_f32(two_bytes(p)); }
CANON int32_t nibble(uint8_t byte, bool high) { return high ? byte >> 4 : byte & 15; }

// Blocks of 32.
struct FileQ8_0 {
  enum { columns = 32, bytes = 34 };
  CANON float d(BlockBytes p) { return half_at(p); }
  CANON int32_t code(BlockBytes p, int32_t i) { return (int32_t)p[2 + i] - (p[2 + i] >= 128 ? 256 : 0); }
};
struct FileQ5_0 {
  enum { columns = 32, bytes = 22 };
  CANON float d(BlockBytes p) { return half_at(p); }
  CANON int32_t code(BlockBytes p, int32_t i) {
    const int32_t high = p[2 + i / 8] >> (i % 8) & 1;
    return (nibble(p[6 + i % 16], i >= 16) | high << 4) - 16;
  }
};
struct FileQ4_0 {
  enum { columns = 32, bytes = 18 };
  CANON float d(BlockBytes p) { return half_at(p); }
  CANON int32_t code(BlockBytes p, int32_t i) { return nibble(p[2 + i % 16], i >= 16) - 8; }
};

// Super-blocks of 256, with sub-blocks of `sub` columns.
struct KScales {
  CANON int32_t scale(BlockBytes s, int32_t j) { return j < 4 ? s[j] & 63 : (s[j + 4] & 15) | (s[j - 4] >> 6) << 4; }
  CANON int32_t minimum(BlockBytes s, int32_t j) { return j < 4 ? s[j + 4] & 63 : s[j + 4] >> 4 | (s[j] >> 6) << 4; }
};
struct FileQ4_K {
  enum { columns = 256, bytes = 144, sub = 32, has_minima = 1 };
  CANON float d(BlockBytes p) { return half_at(p); }
  CANON float dmin(BlockBytes p) { return half_at(p + 2); }
  CANON int32_t scale(BlockBytes p, int32_t j) { return KScales::scale(p + 4, j); }
  CANON int32_t minimum(BlockBytes p, int32_t j) { return KScales::minimum(p + 4, j); }
  CANON int32_t code(BlockBytes p, int32_t i) { return nibble(p[16 + i / 64 * 32 + i % 32], i % 64 >= 32); }
};
struct FileQ5_K {
  enum { columns = 256, bytes = 176, sub = 32, has_minima = 1 };
  CANON float d(BlockBytes p) { return half_at(p); }
  CANON float dmin(BlockBytes p) { return half_at(p + 2); }
  CANON int32_t scale(BlockBytes p, int32_t j) { return KScales::scale(p + 4, j); }
  CANON int32_t minimum(BlockBytes p, int32_t j) { return KScales::minimum(p + 4, j); }
  CANON int32_t code(BlockBytes p, int32_t i) {
    return nibble(p[48 + i / 64 * 32 + i % 32], i % 64 >= 32) | (p[16 + i % 32] >> (i / 32) & 1) << 4;
  }
};
struct FileQ6_K {
  enum { columns = 256, bytes = 210, sub = 16, has_minima = 0 };
  CANON float d(BlockBytes p) { return half_at(p + 208); }
  CANON float dmin(BlockBytes) { return 0.0f; }
  CANON int32_t scale(BlockBytes p, int32_t j) { return (int32_t)p[192 + j] - (p[192 + j] >= 128 ? 256 : 0); }
  CANON int32_t minimum(BlockBytes, int32_t) { return 0; }
  CANON int32_t code(BlockBytes p, int32_t i) {
    const int32_t part = i / 128, quarter = i % 128 / 32, l = i % 32;
    const int32_t low = nibble(p[part * 64 + quarter % 2 * 32 + l], quarter >= 2);
    return (low | (p[128 + part * 32 + l] >> (2 * quarter) & 3) << 4) - 32;
  }
};

// One weight of a block in float32.
template <class F>
CANON float block_weight32(BlockBytes p, int32_t i) {
  return weight_of(F::d(p), F::code(p, i));
}
template <class F>
CANON float block_weight256(BlockBytes p, int32_t i) {
  const int32_t j = i / F::sub;
  if (F::has_minima) return weight_of(F::d(p), F::scale(p, j), F::code(p, i), F::dmin(p), F::minimum(p, j));
  return weight_of(F::d(p), F::scale(p, j), F::code(p, i));
}

}  // namespace VOX_ISA
}  // namespace vox
