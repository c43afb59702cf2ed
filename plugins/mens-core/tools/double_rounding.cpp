// Every float32 of a range, through each elementary function twice: with fma rounded once, and with fma made of
// double, which rounds twice (docs/numerics.md, section 15). The kernels' own text, over another value type.
//
//     K=plugins/mens-core/src/mens_core/kernels N=plugins/mens-cpu-ref/native
//     g++ -std=c++17 -O3 -march=native -ffp-contract=off -fno-math-errno -fno-trapping-math -frounding-math
//         -I $K -I $N plugins/mens-core/tools/double_rounding.cpp -o double_rounding        (one line)
//     ./double_rounding 00800000 7F7FFFFF [NAME]
//
// takes the bits of the lowest and the highest magnitude; both signs are tried. Those two are all finite floats that
// are not flushed, about ten minutes of one core. -frounding-math keeps the compiler from computing 1 / (1 + exp(88))
// itself: it would not flush the subnormal, and every operand beyond would seem to differ.
// A line for each function and sign. Status: 0 no result differs, 1 some do, 2 this build can't tell.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "canon_backward.h"
#include "flush.h"

namespace vox {
namespace VOX_ISA {

// A float whose fma rounds twice; `seen` is not 0 where one of those that led to it rounded otherwise than one fma.
struct Twice {
  float value;
  int32_t seen;
};
struct TwiceBits {
  int32_t value, seen;
};
template <>
struct Splat<Twice> {
  CANON Twice f(uint32_t bits) { return {f_from((int32_t)bits), 0}; }
  CANON TwiceBits i(uint32_t bits) { return {(int32_t)bits, 0}; }
};
CANON Twice f_add(Twice a, Twice b) { return {a.value + b.value, a.seen | b.seen}; }
CANON Twice f_sub(Twice a, Twice b) { return {a.value - b.value, a.seen | b.seen}; }
CANON Twice f_mul(Twice a, Twice b) { return {a.value * b.value, a.seen | b.seen}; }
CANON Twice f_div(Twice a, Twice b) { return {a.value / b.value, a.seen | b.seen}; }
CANON Twice f_fma(Twice a, Twice b, Twice c) {
  const float twice = (float)((double)a.value * (double)b.value + (double)c.value);
  const int32_t other = f_bits(twice) ^ f_bits(f_fma(a.value, b.value, c.value));
  return {twice, a.seen | b.seen | c.seen | other};
}
CANON TwiceBits f_bits(Twice a) { return {f_bits(a.value), a.seen}; }
CANON Twice f_from(TwiceBits a) { return {f_from(a.value), a.seen}; }
CANON Twice f_pick_lt(Twice a, Twice b, Twice yes, Twice no) {
  return {a.value < b.value ? yes.value : no.value, a.seen | b.seen | yes.seen | no.seen};
}
CANON TwiceBits i_add(TwiceBits a, TwiceBits b) { return {i_add(a.value, b.value), a.seen | b.seen}; }
CANON TwiceBits i_sub(TwiceBits a, TwiceBits b) { return {i_sub(a.value, b.value), a.seen | b.seen}; }
CANON TwiceBits i_xor(TwiceBits a, TwiceBits b) { return {a.value ^ b.value, a.seen | b.seen}; }
CANON TwiceBits i_and(TwiceBits a, TwiceBits b) { return {a.value & b.value, a.seen | b.seen}; }
CANON TwiceBits i_or(TwiceBits a, TwiceBits b) { return {a.value | b.value, a.seen | b.seen}; }
template <int N>
CANON TwiceBits i_shl(TwiceBits a) {
  return {i_shl<N>(a.value), a.seen};
}
template <int N>
CANON TwiceBits i_sar(TwiceBits a) {
  return {i_sar<N>(a.value), a.seen};
}
CANON Twice i_to_f(TwiceBits a) { return {i_to_f(a.value), a.seen}; }

}  // namespace VOX_ISA
}  // namespace vox

using namespace vox::VOX_ISA;

struct Found {
  uint64_t tried, inner, results;
};

constexpr int kBatch = 4096;
static float x[kBatch], once[kBatch], twice[kBatch];
static int32_t seen[kBatch];

template <class Function>
static Found search(const char* name, uint32_t first, uint32_t last, Function function) {
  Found found = {0, 0, 0};
  for (uint64_t at = first; at <= last; at += kBatch) {
    const int count = last - at + 1 < kBatch ? (int)(last - at + 1) : kBatch;
    for (int i = 0; i < kBatch; ++i) x[i] = f_from((int32_t)(i < count ? at + i : last));
    for (int i = 0; i < kBatch; ++i) once[i] = function(x[i]);
    for (int i = 0; i < kBatch; ++i) {
      const Twice made = function(Twice{x[i], 0});
      twice[i] = made.value;
      seen[i] = made.seen;
    }
    for (int i = 0; i < count; ++i) {
      found.inner += seen[i] != 0;
      if (f_bits(once[i]) == f_bits(twice[i])) continue;
      if (found.results++ < 8)
        printf("  %s of %08X: once %08X, twice %08X\n", name, f_bits(x[i]), f_bits(once[i]), f_bits(twice[i]));
    }
    found.tried += count;
  }
  printf("%s %08X..%08X: tried %llu; an fma rounds otherwise in %llu, the result differs in %llu\n", name, first, last,
         (unsigned long long)found.tried, (unsigned long long)found.inner, (unsigned long long)found.results);
  fflush(stdout);
  return found;
}

// A middle that must be seen, and quotients below 2^-126 that must be flushed on both sides.
static bool can_tell() {
  const Found middle = search("(must differ)", 0x3F800800u, 0x3F800800u, [](auto a) {
    return f_fma(a, a, F_CONST(decltype(a), 0x21800000u));
  });
  if (middle.results != 1) return fprintf(stderr, "the middle at 3F800800 was not seen; nothing was searched\n"), false;
  search("(must be 0)", 0xC1208000u, 0xC1208FFFu, [](auto a) { return f_gelu_tanh_slope(a).slope; });
  for (int i = 0; i < kBatch; ++i)
    if (once[i] != 0 || twice[i] != 0)
      return fprintf(stderr,
                     "gelu's slope at %08X is %08X beside 00000000: the compiler flushes nothing where it folds "
                     "constants; nothing was searched: compile with -frounding-math\n",
                     f_bits(x[i]), f_bits(once[i])), false;
  return true;
}

int main(int count, char** given) {
  if (count < 3) return fprintf(stderr, "usage: double_rounding LOWEST HIGHEST [NAME], magnitudes as bits\n"), 2;
  const vox::FlushScope flush;
  if (!can_tell()) return 2;
  const uint32_t low = (uint32_t)strtoul(given[1], nullptr, 16), high = (uint32_t)strtoul(given[2], nullptr, 16);
  uint64_t results = 0;
  const auto both_signs = [&](const char* name, uint32_t most, bool takes_negative, auto function) {
    if (count > 3 && strcmp(name, given[3]) != 0) return;
    if (low <= most) results += search(name, low, high < most ? high : most, function).results;
    if (takes_negative) results += search(name, 0x80000000u | low, 0x80000000u | high, function).results;
  };
  const uint32_t any = 0x7F7FFFFFu;
  both_signs("exp", 0x42B00000u, true, [](auto a) { return f_exp(a); });  // to 88
  both_signs("log", any, false, [](auto a) { return f_log(a); });
  both_signs("silu", any, true, [](auto a) { return f_silu(a); });
  both_signs("gelu", any, true, [](auto a) { return f_gelu_tanh(a); });
  both_signs("tanh", any, true, [](auto a) { return f_tanh(a); });
  both_signs("silu_slope", any, true, [](auto a) { return f_silu_slope(a).slope; });
  both_signs("gelu_slope", any, true, [](auto a) { return f_gelu_tanh_slope(a).slope; });
  both_signs("tanh_slope", any, true, [](auto a) { return f_tanh_slope(a); });
  return results != 0;
}
