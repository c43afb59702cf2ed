// What a GPU's matrix unit may do with c and eight products, by number: the orders of mens_torch_mps.matrix_orders,
// written anew in the machine's own arithmetic.
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "runner.h"
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace vox_shim {
namespace {

int g_order;

// Through memory, so that no compiler joins what is two roundings.
float product(float a, float b) {
  volatile float p = a * b;
  return p;
}
float sum(float a, float b) {
  volatile float s = a + b;
  return s;
}
float chain(const float* a, const float* b, float from, int first, int step, int count) {
  for (int i = 0, k = first; i < count; ++i, k += step) from = __builtin_fmaf(a[k], b[k], from);
  return from;
}
float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }  // where float32 does not compute

// Exact where it has 64 bits of significand or more: what the probe's products and sums take.
typedef long double Exact;
Exact exact(const float* a, const float* b, int first, int count) {
  Exact total = 0;
  for (int k = first; k < first + count; ++k) total += static_cast<Exact>(flushed(a[k])) * flushed(b[k]);
  return total;
}
float rounded(Exact x) { return flushed(static_cast<float>(x)); }

float narrow(float x, int bits) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  const int drop = 24 - bits;
  u += ((1u << (drop - 1)) - 1) + (u >> drop & 1);
  u &= ~((1u << drop) - 1);
  memcpy(&x, &u, sizeof x);
  return x;
}

float aligned(const float* a, const float* b, float c) {
  Exact terms[9];
  for (int k = 0; k < 8; ++k) terms[k] = static_cast<Exact>(flushed(a[k])) * flushed(b[k]);
  terms[8] = flushed(c);
  int top = -100000;
  for (Exact term : terms) {
    if (term == 0) continue;
    int exponent;
    // The factors' product fits a double; its exponent is the term's.
    frexp(static_cast<double>(term), &exponent);
    if (exponent > top) top = exponent;
  }
  if (top == -100000) return 0.0f;
  Exact total = 0;
  const double grid = ldexp(1.0, top - 26);
  for (Exact term : terms) total += truncl(term / grid);
  total *= grid;
  const float near = static_cast<float>(total);
  const bool is_beyond = near > 0 ? static_cast<Exact>(near) > total : static_cast<Exact>(near) < total;
  return flushed(is_beyond ? nextafterf(near, 0.0f) : near);
}

}  // namespace

float matrix_sum(const float* a, const float* b, float c) {
  switch (g_order) {
    case 0: return chain(a, b, c, 0, 1, 8);
    case 1: return chain(a, b, c, 7, -1, 8);
    case 2: return sum(c, chain(a, b, 0.0f, 0, 1, 8));
    case 3: return sum(chain(a, b, c, 0, 1, 4), chain(a, b, 0.0f, 4, 1, 4));
    case 4: return sum(chain(a, b, c, 0, 2, 4), chain(a, b, 0.0f, 1, 2, 4));
    case 5: {
      for (int k = 0; k < 8; ++k) c = sum(c, product(a[k], b[k]));
      return c;
    }
    case 6: {
      float p[8];
      for (int k = 0; k < 8; ++k) p[k] = product(a[k], b[k]);
      return sum(c, sum(sum(sum(p[0], p[1]), sum(p[2], p[3])), sum(sum(p[4], p[5]), sum(p[6], p[7]))));
    }
    case 7:
    case 8: {
      const int count = g_order == 7 ? 2 : 4;
      for (int k = 0; k < 8; k += count) c = rounded(static_cast<Exact>(flushed(c)) + exact(a, b, k, count));
      return c;
    }
    case 9: return rounded(static_cast<Exact>(flushed(c)) + exact(a, b, 0, 8));
    case 10: return sum(c, rounded(exact(a, b, 0, 8)));
    case 11: {
      double total = flushed(c);
      for (int k = 0; k < 8; ++k) total = fma(static_cast<double>(flushed(a[k])), flushed(b[k]), total);
      return rounded(total);
    }
    case 12: return aligned(a, b, c);
#if defined(__x86_64__)
    case 13: {
      const unsigned saved = _mm_getcsr();
      _mm_setcsr(saved | 0x6000u);  // toward zero
      const float made = chain(a, b, c, 0, 1, 8);
      _mm_setcsr(saved);
      return made;
    }
    case 14: {
      const unsigned saved = _mm_getcsr();
      _mm_setcsr(saved & ~0x8040u);  // subnormals as they are
      const float made = chain(a, b, c, 0, 1, 8);
      _mm_setcsr(saved);
      return made;
    }
#endif
    case 15:
    case 16: {
      float x[8], y[8];
      for (int k = 0; k < 8; ++k) {
        x[k] = narrow(flushed(a[k]), g_order == 15 ? 11 : 8);
        y[k] = narrow(flushed(b[k]), g_order == 15 ? 11 : 8);
      }
      return chain(x, y, c, 0, 1, 8);
    }
    // What no list has: the last product before the others.
    default: return chain(a, b, __builtin_fmaf(a[7], b[7], c), 0, 1, 7);
  }
}

}  // namespace vox_shim

// From now on matrices add in the order of this number.
extern "C" void shim_matrices(int order) { vox_shim::g_order = order; }
