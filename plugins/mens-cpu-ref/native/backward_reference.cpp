// The scalar reference of the backward operators: plain loops that define the bits
// (docs/numerics.md, section 12). Includes nothing of the kernel source.
#include "backward_abi.h"

#include <math.h>

#include <new>
#include <vector>

#include "flush.h"
#include "reference_math.h"

namespace {

using namespace vox_reference;

int64_t earlier(int64_t fault, int64_t other) {
  return fault == 0 || (other != 0 && other < fault) ? other : fault;
}

// 1 - tanh(x)^2
float tanh_slope(float x) {
  const float minus_2a = fabsf(x) * -2.0f;
  const float e = ref_exp(minus_2a);
  const float below = 1.0f + e;
  const float u = 2.0f / below;
  const float eu = e * u;
  return eu * u;
}

struct Activation {
  float value, slope;
};

Activation silu(float x) {
  const float e = ref_exp(at_most_88(-x));
  const float d = 1.0f + e;
  const float s = x / d;
  const float r = 1.0f / d;
  const float q = e * r;
  return {s, fmaf(s, q, r)};
}

Activation gelu(float x) {
  const float z = x * x;
  const float w = fmaf(z, from_bits(0xBD922279), from_bits(0xBFCC422A));
  const float minus_2u = x * w;
  const float e = ref_exp(at_most_88(minus_2u));
  const float d = 1.0f + e;
  const float s = x / d;
  const float r = 1.0f / d;
  const float q = e * r;
  const float bounded = z < 128.0f ? z : 128.0f;
  const float n = fmaf(bounded, from_bits(0x3E5B33B6), from_bits(0x3FCC422A));
  const float sq = s * q;
  return {s, fmaf(sq, n, r)};
}

int64_t gate_backward(Activation (*activation)(float), const float* dy, const float* gate, const float* up,
                      int64_t rows, int64_t width, float* dgate, float* dup) {
  for (int64_t i = 0; i < rows * width; ++i) {
    const Activation a = activation(gate[i]);
    const float product = dy[i] * up[i];
    dgate[i] = product * a.slope;
    dup[i] = dy[i] * a.value;
  }
  return earlier(first_fault(dgate, rows, width), first_fault(dup, rows, width));
}

// Whether each sequence's rows are its positions from 0 on, and their blocks are there.
bool is_whole(const int32_t* positions, const int32_t* starts, const int32_t* block_tables, int64_t rows,
              int64_t sequences, int64_t blocks_per_sequence, int64_t blocks) {
  if (starts[0] != 0 || starts[sequences] != rows) return false;
  for (int64_t s = 0; s < sequences; ++s) {
    if (starts[s] > starts[s + 1]) return false;
    for (int64_t r = starts[s]; r < starts[s + 1]; ++r) {
      if (positions[r] != r - starts[s] || positions[r] / 128 >= blocks_per_sequence) return false;
      const int32_t block = block_tables[s * blocks_per_sequence + positions[r] / 128];
      if (block < 0 || block >= blocks) return false;
    }
  }
  return true;
}

// One sequence, one query head: probabilities and gradients of scores, [length][length], of which
// only the visible ones are made.
struct Scores {
  int64_t length, window;
  std::vector<float> p, ds;
  bool sees(int64_t i, int64_t j) const { return j <= i && (window == 0 || i - j < window); }
};

}  // namespace

extern "C" {

int64_t ref_norm_backward(const float* dy, const float* x, const float* weight, int64_t rows, int64_t heads,
                          int64_t width, float eps, float* dx) {
  vox::FlushScope flush;
  int64_t fault = 0;
  for (int64_t i = 0; i < rows * heads; ++i) {
    const float* a = x + i * width;
    const float* upstream = dy + i * width;
    float* out = dx + i * width;
    const float s = c128(a, a, width);
    const float mean = s / static_cast<float>(width);
    const float variance = mean + eps;
    const float root = sqrtf(variance);
    const float inverse = 1.0f / root;
    for (int64_t k = 0; k < width; ++k) out[k] = upstream[k] * weight[k];
    const float d = c128(out, a, width);
    const float scaled = d * inverse;
    const float c = scaled / static_cast<float>(width);
    for (int64_t k = 0; k < width; ++k) {
      const float normed = a[k] * inverse;
      const float t = fmaf(-normed, c, out[k]);
      out[k] = t * inverse;
    }
    if (!is_finite(s))
      for (int64_t k = 0; k < width; ++k) out[k] = from_bits(0x7FC00000);
    if (fault == 0 && first_fault(out, 1, width) != 0) fault = 1 + i / heads;
  }
  return fault;
}

int64_t ref_rope_backward(const float* dy, int64_t rows, int64_t heads, int64_t pairs, const float* table,
                          const int32_t* slots, int64_t slot_count, const int32_t* positions, float* dx) {
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r)
    if (positions[r] < 0 || positions[r] / 128 >= slot_count || slots[positions[r] / 128] < 0) return VOX_OUT_OF_RANGE;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t i = 0; i < pairs; ++i) {
        const int64_t at = (r * heads + h) * 2 * pairs + i;
        const int64_t place = slots[positions[r] / 128] * 128 + positions[r] % 128;
        const float cosine = table[place * 2 * pairs + i], sine = table[(place * 2 + 1) * pairs + i];
        const float d1 = dy[at], d2 = dy[at + pairs];
        const float t1 = d2 * sine;
        dx[at] = fmaf(d1, cosine, t1);
        const float t2 = d1 * sine;
        dx[at + pairs] = fmaf(d2, cosine, -t2);
      }
  return first_fault(dx, rows, heads * 2 * pairs);
}

int64_t ref_silu_gate_backward(const float* dy, const float* gate, const float* up, int64_t rows, int64_t width,
                               float* dgate, float* dup) {
  vox::FlushScope flush;
  return gate_backward(silu, dy, gate, up, rows, width, dgate, dup);
}

int64_t ref_gelu_gate_backward(const float* dy, const float* gate, const float* up, int64_t rows, int64_t width,
                               float* dgate, float* dup) {
  vox::FlushScope flush;
  return gate_backward(gelu, dy, gate, up, rows, width, dgate, dup);
}

int64_t ref_softcap_backward(const float* dy, const float* x, int64_t rows, int64_t width, float cap, float* dx) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) {
    const float ratio = x[i] / cap;
    dx[i] = dy[i] * tanh_slope(ratio);
  }
  return first_fault(dx, rows, width);
}

int64_t ref_attention_backward(const float* dy, const float* q, const float* out, const float* m, const float* l,
                               int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                               const int32_t* positions, const int32_t* starts, const int32_t* block_tables,
                               int64_t sequences, int64_t blocks_per_sequence, int64_t blocks, const float* keys,
                               const float* values, float scale, int64_t window, float softcap, float* dq, float* dk,
                               float* dv) try {
  vox::FlushScope flush;
  if (!is_whole(positions, starts, block_tables, rows, sequences, blocks_per_sequence, blocks)) return VOX_OUT_OF_RANGE;
  const int64_t C = head_dim, stride = (C + 15) / 16 * 16, group = heads / kv_heads;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t first_row = starts[s], length = starts[s + 1] - first_row;
    for (int64_t h = 0; h < heads; ++h) {
      const int64_t g = h / group;
      const auto at_query = [&](int64_t i) { return ((first_row + i) * heads + h) * C; };
      const auto cache = [&](int64_t j) {
        return block_tables[s * blocks_per_sequence + j / 128] * kv_heads + g;
      };
      const auto key = [&](int64_t j, int64_t c) { return keys[(cache(j) * C + c) * 128 + j % 128]; };
      const auto value = [&](int64_t j, int64_t c) { return values[(cache(j) * 128 + j % 128) * stride + c]; };
      Scores head{length, window, std::vector<float>(static_cast<size_t>(length * length)),
                  std::vector<float>(static_cast<size_t>(length * length))};

      for (int64_t i = 0; i < length; ++i) {
        const float* query = q + at_query(i);
        const float* upstream = dy + at_query(i);
        const float delta = c128(upstream, out + at_query(i), C);
        const float row_m = m[(first_row + i) * heads + h], row_l = l[(first_row + i) * heads + h];
        for (int64_t j = 0; j <= i; ++j) {
          if (!head.sees(i, j)) continue;
          float raw = 0.0f, dp = 0.0f;
          for (int64_t chunk = 0; chunk < C; chunk += 128) {
            float raw_p = 0.0f, dp_p = 0.0f;
            for (int64_t c = chunk; c < C && c < chunk + 128; ++c) {
              raw_p = fmaf(query[c], key(j, c), raw_p);
              dp_p = fmaf(upstream[c], value(j, c), dp_p);
            }
            raw = chunk == 0 ? raw_p : raw + raw_p;
            dp = chunk == 0 ? dp_p : dp + dp_p;
          }
          const float x = raw * scale;
          const float score = softcap != 0.0f ? capped(x, softcap) : x;
          const float below = score - row_m;
          const float e = ref_exp(below);
          const float p = e / row_l;
          const float excess = dp - delta;
          float ds = p * excess;
          if (softcap != 0.0f) {
            const float ratio = x / softcap;
            ds = ds * tanh_slope(ratio);
          }
          head.p[static_cast<size_t>(i * length + j)] = p;
          head.ds[static_cast<size_t>(i * length + j)] = ds;
        }
      }

      for (int64_t i = 0; i < length; ++i)
        for (int64_t c = 0; c < C; ++c) {
          float y = 0.0f;
          bool is_first = true;
          for (int64_t b = 0; b <= i / 128; ++b) {
            float part = 0.0f;
            bool is_seen = false;
            for (int64_t j = b * 128; j < b * 128 + 128 && j < length; ++j) {
              if (!head.sees(i, j)) continue;
              part = fmaf(head.ds[static_cast<size_t>(i * length + j)], key(j, c), part);
              is_seen = true;
            }
            if (!is_seen) continue;
            y = is_first ? part : y + part;
            is_first = false;
          }
          dq[at_query(i) + c] = y * scale;
        }

      for (int64_t j = 0; j < length; ++j)
        for (int64_t c = 0; c < C; ++c) {
          float* const to_k = dk + ((first_row + j) * kv_heads + g) * C + c;
          float* const to_v = dv + ((first_row + j) * kv_heads + g) * C + c;
          bool is_first = h % group == 0;
          for (int64_t b = j / 128; b * 128 < length; ++b) {
            float part_k = 0.0f, part_v = 0.0f;
            bool is_seen = false;
            for (int64_t i = b * 128; i < b * 128 + 128 && i < length; ++i) {
              if (!head.sees(i, j)) continue;
              part_k = fmaf(head.ds[static_cast<size_t>(i * length + j)], q[at_query(i) + c], part_k);
              part_v = fmaf(head.p[static_cast<size_t>(i * length + j)], dy[at_query(i) + c], part_v);
              is_seen = true;
            }
            if (!is_seen) continue;
            *to_k = is_first ? part_k : *to_k + part_k;
            *to_v = is_first ? part_v : *to_v + part_v;
            is_first = false;
          }
          if (h % group == group - 1) *to_k = *to_k * scale;
        }
    }
  }
  return earlier(first_fault(dq, rows, heads * C),
                 earlier(first_fault(dk, rows, kv_heads * C), first_fault(dv, rows, kv_heads * C)));
} catch (const std::bad_alloc&) {
  return VOX_OUT_OF_MEMORY;
}
}
