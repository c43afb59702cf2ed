// The scalar reference: plain loops that define the bits (docs/numerics.md).
//
// It includes nothing of the kernel source, so a mistake there cannot hide here. Every float
// operation is written alone and rounded once; subnormals are flushed by the environment.
#include "abi.h"

#include <math.h>
#include <string.h>

#include "backward_abi.h"
#include "flush.h"
#include "reference_math.h"

namespace {

using namespace vox_reference;

// --- weights ---------------------------------------------------------------------------------

float widen_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
  const uint32_t exponent = (half >> 10) & 31, fraction = half & 0x3FF;
  if (exponent == 31) return from_bits(sign | 0x7F800000 | (fraction << 13));
  if (exponent != 0) return from_bits(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float magnitude = static_cast<float>(fraction) * from_bits(0x33800000);  // 2^-24, exact
  return copysignf(magnitude, from_bits(sign | 0x3F800000));
}

float widened(int32_t format, const void* source, int64_t i) {
  if (format == 0) return static_cast<const float*>(source)[i];
  const uint16_t half = static_cast<const uint16_t*>(source)[i];
  return format == 1 ? widen_half(half) : from_bits(static_cast<uint32_t>(half) << 16);
}

// --- rotary angles: numbers as 32-bit digits, lowest first -----------------------------------

constexpr int kDigits = 16;
struct Number {
  uint32_t digit[kDigits] = {};
};

Number from_halves(uint64_t high, uint64_t low) {
  Number n;
  n.digit[0] = static_cast<uint32_t>(low);
  n.digit[1] = static_cast<uint32_t>(low >> 32);
  n.digit[2] = static_cast<uint32_t>(high);
  n.digit[3] = static_cast<uint32_t>(high >> 32);
  return n;
}

Number times(const Number& a, const Number& b) {
  Number product;
  for (int i = 0; i < kDigits; ++i) {
    uint64_t carry = 0;
    for (int j = 0; i + j < kDigits; ++j) {
      const uint64_t t = static_cast<uint64_t>(a.digit[i]) * b.digit[j] + product.digit[i + j] + carry;
      product.digit[i + j] = static_cast<uint32_t>(t);
      carry = t >> 32;
    }
  }
  return product;
}

Number minus(const Number& a, const Number& b) {  // a >= b
  Number difference;
  uint64_t borrow = 0;
  for (int i = 0; i < kDigits; ++i) {
    const uint64_t t = static_cast<uint64_t>(a.digit[i]) - b.digit[i] - borrow;
    difference.digit[i] = static_cast<uint32_t>(t);
    borrow = t >> 63;
  }
  return difference;
}

bool bit(const Number& n, int i) { return (n.digit[i / 32] >> (i % 32)) & 1; }

// floor(n / 2^shift) mod 2^bits
Number slice(const Number& n, int shift, int bits) {
  Number s;
  for (int i = 0; 32 * i < bits; ++i) {
    const int from = shift / 32 + i;
    uint64_t two = from < kDigits ? n.digit[from] : 0;
    if (from + 1 < kDigits) two |= static_cast<uint64_t>(n.digit[from + 1]) << 32;
    s.digit[i] = static_cast<uint32_t>(two >> (shift % 32));
    if (bits - 32 * i < 32) s.digit[i] &= (1u << (bits - 32 * i)) - 1;
  }
  return s;
}

Number power_of_two(int exponent) {
  Number n;
  n.digit[exponent / 32] = 1u << (exponent % 32);
  return n;
}

Number mulhi(const Number& a, const Number& b) { return slice(times(a, b), 128, 32 * kDigits - 128); }

// floor(2^128 / n!)
Number one_over_factorial(int n) {
  Number q = power_of_two(128);
  for (uint32_t divisor = 2; divisor <= static_cast<uint32_t>(n); ++divisor) {
    uint64_t rest = 0;
    for (int i = kDigits - 1; i >= 0; --i) {
      const uint64_t t = (rest << 32) | q.digit[i];
      q.digit[i] = static_cast<uint32_t>(t / divisor);
      rest = t % divisor;
    }
  }
  return q;
}

float nearest(const Number& value, bool is_negative) {  // value / 2^192
  int length = 32 * kDigits;
  while (length > 0 && !bit(value, length - 1)) --length;
  if (length < 25) return 0.0f;  // far below 2^-126
  Number kept = slice(value, length - 24, 24);
  uint32_t mantissa = kept.digit[0];
  const bool half = bit(value, length - 25);
  bool rest = false;
  for (int i = 0; i < length - 25; ++i) rest = rest || bit(value, i);
  if (half && (rest || mantissa % 2 == 1)) ++mantissa;
  int exponent = length - 1 - 192;  // of the leading bit
  if (mantissa == 0x1000000) {
    mantissa = 0x800000;
    ++exponent;
  }
  if (exponent < -126) return 0.0f;
  return from_bits((is_negative ? 0x80000000u : 0u) | static_cast<uint32_t>(exponent + 127) << 23 |
                   (mantissa & 0x7FFFFF));
}

struct RotaryTerms {
  Number sine[15], cosine[16];
};

RotaryTerms rotary_terms() {
  RotaryTerms terms;
  for (int k = 1; k <= 15; ++k) terms.sine[k - 1] = one_over_factorial(2 * k + 1);
  for (int k = 1; k <= 16; ++k) terms.cosine[k - 1] = one_over_factorial(2 * k);
  return terms;
}

void angle(const RotaryTerms& terms, const Number& frequency, uint64_t position, const Number& factor, float* cosine,
           float* sine) {
  const Number a = slice(times(frequency, from_halves(0, position)), 0, 128);
  const uint32_t octant = slice(a, 125, 3).digit[0];
  Number r = slice(a, 0, 125);
  if (octant % 2 == 1) r = minus(power_of_two(125), r);
  const Number two_pi = from_halves(0xc90fdaa22168c234u, 0xc4c6628b80dc1cd1u);
  const Number x = times(mulhi(times(r, from_halves(0, 4)), two_pi), from_halves(0, 2));
  const Number z = mulhi(x, x);
  Number h;
  for (int k = 15; k >= 1; --k) h = mulhi(z, minus(terms.sine[k - 1], h));
  const Number s = minus(x, mulhi(x, h));
  h = Number();
  for (int k = 16; k >= 1; --k) h = mulhi(z, minus(terms.cosine[k - 1], h));
  const Number c = minus(power_of_two(128), h);
  const bool exchanged = octant == 1 || octant == 2 || octant == 5 || octant == 6;
  const Number& near_cosine = exchanged ? s : c;
  const Number& near_sine = exchanged ? c : s;
  *cosine = nearest(times(near_cosine, factor), octant >= 2 && octant <= 5);
  *sine = nearest(times(near_sine, factor), octant >= 4);
}

// --- rows of a step ----------------------------------------------------------------------------

// Whether every row finds its block; with `window`, whether it finds all blocks that it sees.
bool is_step_in_range(const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t rows,
                      int64_t sequences, int64_t blocks_per_sequence, int64_t blocks, bool reads, int64_t window) {
  if (starts[0] != 0 || starts[sequences] != rows) return false;
  for (int64_t s = 0; s < sequences; ++s) {
    if (starts[s] > starts[s + 1]) return false;
    for (int64_t r = starts[s]; r < starts[s + 1]; ++r) {
      const int64_t position = positions[r];
      if (position < 0 || position / 128 >= blocks_per_sequence) return false;
      if (r > starts[s] && position <= positions[r - 1]) return false;
      int64_t low = reads ? (window > 0 && position - window + 1 > 0 ? position - window + 1 : 0) : position;
      for (int64_t b = 0; b <= position / 128; ++b) {
        const int32_t block = block_tables[s * blocks_per_sequence + b];
        if (block >= blocks || (b >= low / 128 && block < 0)) return false;
      }
    }
  }
  return true;
}

int64_t value_stride(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Attention, and where `saved_m` and `saved_l` are not null the m and l of each row and head.
int64_t attend(const float* q, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
               const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t sequences,
               int64_t blocks_per_sequence, int64_t blocks, const float* keys, const float* values, float scale,
               int64_t window, float softcap, float* out, float* saved_m, float* saved_l) {
  vox::FlushScope flush;
  if (!is_step_in_range(positions, starts, block_tables, rows, sequences, blocks_per_sequence, blocks, true, window))
    return VOX_OUT_OF_RANGE;
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t r = starts[s]; r < starts[s + 1]; ++r)
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t g = h / (heads / kv_heads);
        const float* query = q + (r * heads + h) * head_dim;
        float* o = out + (r * heads + h) * head_dim;
        const int64_t last = positions[r];
        const int64_t first = window > 0 && last - window + 1 > 0 ? last - window + 1 : 0;
        float m = 0.0f, l = 0.0f;
        for (int64_t b = first / 128; b <= last / 128; ++b) {
          const int64_t cache = block_tables[s * blocks_per_sequence + b] * kv_heads + g;
          const int64_t low = first > b * 128 ? first - b * 128 : 0;
          const int64_t high = last - b * 128 < 127 ? last - b * 128 : 127;
          float weight[128];
          float m_b = 0.0f;
          for (int64_t j = low; j <= high; ++j) {
            float score = 0.0f;
            for (int64_t chunk = 0; chunk < head_dim; chunk += 128) {
              float p = 0.0f;
              for (int64_t c = chunk; c < head_dim && c < chunk + 128; ++c)
                p = fmaf(query[c], keys[(cache * head_dim + c) * 128 + j], p);
              score = chunk == 0 ? p : score + p;
            }
            score = score * scale;
            if (softcap != 0.0f) score = capped(score, softcap);
            weight[j] = score;
            if (j == low || score > m_b) m_b = score;
          }
          m_b = m_b + 0.0f;  // -0 counts as +0
          float l_b = 0.0f;
          for (int64_t j = low; j <= high; ++j) {
            const float x = weight[j] - m_b;
            weight[j] = ref_exp(x);
            l_b = l_b + weight[j];
          }
          const bool is_first = b == first / 128;
          const float larger = is_first || m_b > m ? m_b : m;
          const float old_distance = m - larger, new_distance = m_b - larger;
          const float old_share = ref_exp(old_distance), new_share = ref_exp(new_distance);
          for (int64_t c = 0; c < head_dim; ++c) {
            float o_b = 0.0f;
            for (int64_t j = low; j <= high; ++j)
              o_b = fmaf(weight[j], values[(cache * 128 + j) * value_stride(head_dim) + c], o_b);
            const float t = o_b * new_share;
            o[c] = is_first ? o_b : fmaf(o[c], old_share, t);
          }
          const float t = l_b * new_share;
          l = is_first ? l_b : fmaf(l, old_share, t);
          m = larger;
        }
        for (int64_t c = 0; c < head_dim; ++c) o[c] = o[c] / l;
        if (saved_m != nullptr) saved_m[r * heads + h] = m;
        if (saved_l != nullptr) saved_l[r * heads + h] = l;
      }
  return first_fault(out, rows, heads * head_dim);
}

}  // namespace

extern "C" {

// The reference keeps a weight as it is, row by row.
int64_t ref_pack(int32_t format, const void* source, int64_t outputs, int64_t inputs, void* packed) {
  memcpy(packed, source, static_cast<size_t>(outputs * inputs * (format == 0 ? 4 : 2)));
  for (int64_t i = 0; i < outputs * inputs; ++i)
    if (!is_finite(widened(format, source, i))) return 1 + i / inputs;
  return 0;
}

int64_t ref_widen(int32_t format, const void* source, int64_t elements, int32_t add_one, float* out) {
  vox::FlushScope flush;
  // The product flushes a subnormal; volatile, or the compiler would drop it.
  const volatile float opaque = 1.0f;
  const float one = opaque;
  for (int64_t i = 0; i < elements; ++i) {
    const float w = widened(format, source, i);
    out[i] = add_one ? w + 1.0f : w * one;
  }
  return first_fault(out, 1, elements);
}

int64_t ref_embed(int32_t format, const void* packed, int64_t outputs, int64_t inputs, const int32_t* token_ids,
                  int64_t rows, float scale, float* out) {
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r)
    if (token_ids[r] < 0 || token_ids[r] >= outputs) return VOX_OUT_OF_RANGE;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < inputs; ++k) out[r * inputs + k] = widened(format, packed, token_ids[r] * inputs + k) * scale;
  return first_fault(out, rows, inputs);
}

int64_t ref_linear(int32_t format, const void* packed, int64_t outputs, int64_t inputs, const float* x, int64_t rows,
                   float* out) {
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < outputs; ++n) {
      float y = 0.0f;
      for (int64_t chunk = 0; chunk < inputs; chunk += 128) {
        float p = 0.0f;
        for (int64_t k = chunk; k < inputs && k < chunk + 128; ++k)
          p = fmaf(x[r * inputs + k], widened(format, packed, n * inputs + k), p);
        y = chunk == 0 ? p : y + p;
      }
      out[r * outputs + n] = y;
    }
  return first_fault(out, rows, outputs);
}

int64_t ref_norm(const float* x, const float* weight, int64_t rows, int64_t heads, int64_t width, float eps,
                 float* out) {
  vox::FlushScope flush;
  int64_t fault = 0;
  for (int64_t i = 0; i < rows * heads; ++i) {
    const float* a = x + i * width;
    const float s = c128(a, a, width);
    const float mean = s / static_cast<float>(width);
    const float variance = mean + eps;
    const float root = sqrtf(variance);
    const float inverse = 1.0f / root;
    for (int64_t k = 0; k < width; ++k) {
      const float normed = a[k] * inverse;
      out[i * width + k] = normed * weight[k];
    }
    if (!is_finite(s))
      for (int64_t k = 0; k < width; ++k) out[i * width + k] = from_bits(0x7FC00000);
    if (fault == 0 && first_fault(out + i * width, 1, width) != 0) fault = 1 + i / heads;
  }
  return fault;
}

int64_t ref_rotary(const uint64_t* frequencies, int64_t pairs, uint64_t factor_low, uint64_t factor_high,
                   int64_t first_position, int64_t positions, float* table) {
  const RotaryTerms terms = rotary_terms();
  for (int64_t p = 0; p < positions; ++p)
    for (int64_t i = 0; i < pairs; ++i)
      angle(terms, from_halves(frequencies[2 * i + 1], frequencies[2 * i]), static_cast<uint64_t>(first_position + p),
            from_halves(factor_high, factor_low), table + p * 2 * pairs + i, table + (p * 2 + 1) * pairs + i);
  return 0;
}

int64_t ref_rope(const float* x, int64_t rows, int64_t heads, int64_t pairs, const float* table, const int32_t* slots,
                 int64_t slot_count, const int32_t* positions, float* out) {
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r)
    if (positions[r] < 0 || positions[r] / 128 >= slot_count || slots[positions[r] / 128] < 0) return VOX_OUT_OF_RANGE;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < pairs; ++i) {
        const int64_t at = (r * heads + h) * 2 * pairs + i;
        const int64_t place = slots[positions[r] / 128] * 128 + positions[r] % 128;
        const float cosine = table[place * 2 * pairs + i], sine = table[(place * 2 + 1) * pairs + i];
        const float x1 = x[at], x2 = x[at + pairs];
        const float t1 = x2 * sine;
        out[at] = fmaf(x1, cosine, -t1);
        const float t2 = x1 * sine;
        out[at + pairs] = fmaf(x2, cosine, t2);
      }
  return first_fault(out, rows, heads * 2 * pairs);
}

int64_t ref_kv_append(const float* k, const float* v, int64_t rows, int64_t kv_heads, int64_t head_dim,
                      const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t sequences,
                      int64_t blocks_per_sequence, int64_t blocks, float* keys, float* values) {
  if (!is_step_in_range(positions, starts, block_tables, rows, sequences, blocks_per_sequence, blocks, false, 0))
    return VOX_OUT_OF_RANGE;
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t r = starts[s]; r < starts[s + 1]; ++r)
      for (int64_t g = 0; g < kv_heads; ++g)
        for (int64_t c = 0; c < head_dim; ++c) {
          const int64_t block = block_tables[s * blocks_per_sequence + positions[r] / 128] * kv_heads + g;
          const int64_t slot = positions[r] % 128;
          keys[(block * head_dim + c) * 128 + slot] = k[(r * kv_heads + g) * head_dim + c];
          values[(block * 128 + slot) * value_stride(head_dim) + c] = v[(r * kv_heads + g) * head_dim + c];
        }
  return 0;
}

int64_t ref_attention(const float* q, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                      const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t sequences,
                      int64_t blocks_per_sequence, int64_t blocks, const float* keys, const float* values, float scale,
                      int64_t window, float softcap, float* out) {
  return attend(q, rows, heads, kv_heads, head_dim, positions, starts, block_tables, sequences, blocks_per_sequence,
                blocks, keys, values, scale, window, softcap, out, nullptr, nullptr);
}

int64_t ref_attention_saving(const float* q, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                             const int32_t* positions, const int32_t* starts, const int32_t* block_tables,
                             int64_t sequences, int64_t blocks_per_sequence, int64_t blocks, const float* keys,
                             const float* values, float scale, int64_t window, float softcap, float* out, float* m,
                             float* l) {
  return attend(q, rows, heads, kv_heads, head_dim, positions, starts, block_tables, sequences, blocks_per_sequence,
                blocks, keys, values, scale, window, softcap, out, m, l);
}

int64_t ref_add(const float* a, const float* b, int64_t rows, int64_t width, float* out) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) out[i] = a[i] + b[i];
  return first_fault(out, rows, width);
}

int64_t ref_silu_gate(const float* gate, const float* up, int64_t rows, int64_t width, float* out) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) {
    const float y = ref_silu(gate[i]);
    out[i] = y * up[i];
  }
  return first_fault(out, rows, width);
}

int64_t ref_gelu_gate(const float* gate, const float* up, int64_t rows, int64_t width, float* out) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) {
    const float y = ref_gelu(gate[i]);
    out[i] = y * up[i];
  }
  return first_fault(out, rows, width);
}

int64_t ref_softcap(const float* x, int64_t rows, int64_t width, float cap, float* out) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) out[i] = capped(x[i], cap);
  return first_fault(out, rows, width);
}

int64_t ref_penalise(float* logits, int64_t width, const int32_t* token_ids, int64_t count, const float* repetition,
                     const float* subtract) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < count; ++i)
    if (token_ids[i] < 0 || token_ids[i] >= width) return VOX_OUT_OF_RANGE;
  int64_t fault = 0;
  for (int64_t i = 0; i < count; ++i) {
    const float x = logits[token_ids[i]];
    const float repeated = x > 0.0f ? x / repetition[i] : x * repetition[i];
    logits[token_ids[i]] = repeated - subtract[i];
    if (!is_finite(logits[token_ids[i]])) fault = 1;
  }
  return fault;
}

int64_t ref_argmax(const float* x, int64_t rows, int64_t width, int32_t* out) {
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r) {
    int32_t best = 0;
    for (int64_t i = 1; i < width; ++i)
      if (x[r * width + i] > x[r * width + best]) best = static_cast<int32_t>(i);
    out[r] = best;
  }
  return 0;
}

int64_t ref_token_weights(const float* x, int64_t width, float temperature, uint64_t* out) {
  vox::FlushScope flush;
  float m = x[0];
  for (int64_t i = 1; i < width; ++i)
    if (x[i] > m) m = x[i];
  m = m + 0.0f;
  for (int64_t i = 0; i < width; ++i) {
    const float below = x[i] - m;
    const float tempered = below / temperature;
    const float e = ref_exp(tempered);
    const float scaled = e * 4294967296.0f;
    out[i] = static_cast<uint64_t>(scaled);
  }
  return 0;
}

int64_t ref_log_normaliser(const float* x, int64_t rows, int64_t width, float* out) {
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r) {
    const float* a = x + r * width;
    float m = a[0];
    for (int64_t i = 1; i < width; ++i)
      if (a[i] > m) m = a[i];
    m = m + 0.0f;
    float y = 0.0f;
    for (int64_t chunk = 0; chunk < width; chunk += 128) {
      float p = 0.0f;
      for (int64_t i = chunk; i < width && i < chunk + 128; ++i) {
        const float below = a[i] - m;
        p = p + ref_exp(below);
      }
      y = chunk == 0 ? p : y + p;
    }
    out[r] = is_finite(y) ? m + ref_log(y) : y;
  }
  return first_fault(out, rows, 1);
}

int64_t ref_function(int32_t which, const float* x, int64_t elements, float* out) {
  vox::FlushScope flush;
  float (*const functions[5])(float) = {ref_exp, ref_log, ref_silu, ref_gelu, ref_tanh};
  for (int64_t i = 0; i < elements; ++i) out[i] = functions[which](x[i]);
  return 0;
}
}
