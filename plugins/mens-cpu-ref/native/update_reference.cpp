// The scalar reference of loss, gradients of parameters and update: plain loops that define the
// bits (docs/numerics.md). It includes nothing of the kernel source.
#include <math.h>

#include <vector>

#include "flush.h"
#include "quant_abi.h"
#include "reference_math.h"
#include "update_abi.h"

namespace {

using namespace vox_reference;

bool do_starts_ascend(const int32_t* starts, int64_t examples) {
  if (starts[0] != 0) return false;
  for (int64_t e = 0; e < examples; ++e)
    if (starts[e] > starts[e + 1]) return false;
  return true;
}

// dy times a weight that is already float32.
int64_t times_rows(const std::vector<float>& w, int64_t outputs, int64_t inputs, const float* dy, int64_t rows,
                   float* out) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < inputs; ++k) {
      float y = 0.0f;
      for (int64_t chunk = 0; chunk < outputs; chunk += 128) {
        float p = 0.0f;
        for (int64_t n = chunk; n < outputs && n < chunk + 128; ++n)
          p = fmaf(dy[r * outputs + n], w[static_cast<size_t>(n * inputs + k)], p);
        y = chunk == 0 ? p : y + p;
      }
      out[r * inputs + k] = y;
    }
  return first_fault(out, rows, inputs);
}

std::vector<int32_t> all_rows(int64_t count) {
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (int64_t n = 0; n < count; ++n) ids[static_cast<size_t>(n)] = static_cast<int32_t>(n);
  return ids;
}

struct Words {
  uint32_t word[4];
};

Words philox(uint64_t seed, Words counter) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t p0 = 0xD2511F53ull * counter.word[0], p1 = 0xCD9E8D57ull * counter.word[2];
    const uint32_t high0 = static_cast<uint32_t>(p0 >> 32), high1 = static_cast<uint32_t>(p1 >> 32);
    counter = {{high1 ^ counter.word[1] ^ k0, static_cast<uint32_t>(p1), high0 ^ counter.word[3] ^ k1,
                static_cast<uint32_t>(p0)}};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

}  // namespace

extern "C" {

int64_t ref_linear_backward(int32_t format, const void* packed, int64_t outputs, int64_t inputs, const float* dy,
                            int64_t rows, float* out) {
  std::vector<float> w(static_cast<size_t>(outputs * inputs));
  ref_embed(format, packed, outputs, inputs, all_rows(outputs).data(), outputs, 1.0f, w.data());
  vox::FlushScope flush;
  return times_rows(w, outputs, inputs, dy, rows, out);
}

int64_t ref_quant_linear_backward(int32_t format, const void* packed, int64_t outputs, int64_t inputs, const float* dy,
                                  int64_t rows, float* out) {
  std::vector<float> w(static_cast<size_t>(outputs * inputs));
  ref_quant_rows(format, static_cast<const uint8_t*>(packed), outputs, inputs, all_rows(outputs).data(), outputs, 1.0f,
                 w.data());
  vox::FlushScope flush;
  return times_rows(w, outputs, inputs, dy, rows, out);
}

int64_t ref_embed_backward(const float* dy, const int32_t* token_ids, const int32_t* starts, int64_t examples,
                           int64_t table_rows, int64_t width, float* out) {
  if (!do_starts_ascend(starts, examples)) return VOX_OUT_OF_RANGE;
  for (int64_t r = 0; r < starts[examples]; ++r)
    if (token_ids[r] < 0 || token_ids[r] >= table_rows) return VOX_OUT_OF_RANGE;
  vox::FlushScope flush;
  for (int64_t e = 0; e < examples; ++e)
    for (int64_t v = 0; v < table_rows; ++v)
      for (int64_t k = 0; k < width; ++k) {
        float y = 0.0f;
        bool is_first = true;
        for (int64_t chunk = starts[e]; chunk < starts[e + 1]; chunk += 128) {
          float p = 0.0f;
          bool has_terms = false;
          for (int64_t r = chunk; r < starts[e + 1] && r < chunk + 128; ++r) {
            if (token_ids[r] != v) continue;
            p = p + dy[r * width + k];
            has_terms = true;
          }
          if (!has_terms) continue;
          y = is_first ? p : y + p;
          is_first = false;
        }
        out[(e * table_rows + v) * width + k] = y;
      }
  return first_fault(out, examples, table_rows * width);
}

int64_t ref_example_products(const float* a, const float* b, const int32_t* starts, int64_t examples, int64_t a_width,
                             int64_t b_width, float* out) {
  if (!do_starts_ascend(starts, examples)) return VOX_OUT_OF_RANGE;
  vox::FlushScope flush;
  for (int64_t e = 0; e < examples; ++e)
    for (int64_t i = 0; i < a_width; ++i)
      for (int64_t j = 0; j < b_width; ++j) {
        float y = 0.0f;
        for (int64_t chunk = starts[e]; chunk < starts[e + 1]; chunk += 128) {
          float p = 0.0f;
          for (int64_t r = chunk; r < starts[e + 1] && r < chunk + 128; ++r)
            p = fmaf(a[r * a_width + i], b[r * b_width + j], p);
          y = chunk == starts[e] ? p : y + p;
        }
        out[(e * a_width + i) * b_width + j] = y;
      }
  return first_fault(out, examples, a_width * b_width);
}

int64_t ref_cross_entropy(const float* logits, const int32_t* targets, int64_t rows, int64_t width, float* losses,
                          float* gradients) {
  for (int64_t r = 0; r < rows; ++r)
    if (targets[r] < 0 || targets[r] >= width) return VOX_OUT_OF_RANGE;
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r) {
    const float* x = logits + r * width;
    float m = x[0];
    for (int64_t i = 1; i < width; ++i)
      if (x[i] > m) m = x[i];
    m = m + 0.0f;  // -0 counts as +0
    float sum = 0.0f;
    for (int64_t chunk = 0; chunk < width; chunk += 128) {
      float p = 0.0f;
      for (int64_t i = chunk; i < width && i < chunk + 128; ++i) {
        const float below = x[i] - m;
        p = p + ref_exp(below);
      }
      sum = chunk == 0 ? p : sum + p;
    }
    if (is_finite(sum)) {
      const float normaliser = m + ref_log(sum);
      losses[r] = normaliser - x[targets[r]];
    } else {
      losses[r] = sum;
    }
    for (int64_t i = 0; i < width; ++i) {
      const float below = x[i] - m;
      const float share = ref_exp(below) / sum;
      gradients[r * width + i] = i == targets[r] ? share - 1.0f : share;
    }
  }
  return first_fault(losses, rows, 1);
}

int64_t ref_example_sums(const float* losses, const int32_t* positions, const int32_t* starts, int64_t examples,
                         float* out) {
  if (!do_starts_ascend(starts, examples)) return VOX_OUT_OF_RANGE;
  for (int64_t e = 0; e < examples; ++e)
    for (int64_t i = starts[e]; i < starts[e + 1]; ++i)
      if (positions[i] < 0 || (i > starts[e] && positions[i] <= positions[i - 1])) return VOX_OUT_OF_RANGE;
  vox::FlushScope flush;
  for (int64_t e = 0; e < examples; ++e) {
    out[e] = 0.0f;
    if (starts[e] == starts[e + 1]) continue;
    const int64_t last = positions[starts[e + 1] - 1];
    bool is_first = true;
    for (int64_t chunk = 0; chunk <= last / 128; ++chunk) {
      float p = 0.0f;
      bool has_terms = false;
      for (int64_t i = starts[e]; i < starts[e + 1]; ++i) {
        if (positions[i] / 128 != chunk) continue;
        p = p + losses[i];
        has_terms = true;
      }
      if (!has_terms) continue;
      out[e] = is_first ? p : out[e] + p;
      is_first = false;
    }
  }
  return first_fault(out, examples, 1);
}

int64_t ref_scale(const float* x, int64_t rows, int64_t width, float factor, float* out) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) out[i] = x[i] * factor;
  return first_fault(out, rows, width);
}

int64_t ref_add_scaled(const float* y, const float* x, int64_t rows, int64_t width, float factor, float* out) {
  vox::FlushScope flush;
  for (int64_t i = 0; i < rows * width; ++i) {
    const float scaled = x[i] * factor;
    out[i] = y[i] + scaled;
  }
  return first_fault(out, rows, width);
}

int64_t ref_dropout(const float* x, const int32_t* positions, const int32_t* examples, int64_t rows, int64_t width,
                    uint64_t seed, uint32_t step, uint32_t layer, uint32_t threshold, float factor, float* out) {
  if (width > (1 << 18) || layer >= 1u << 16) return VOX_OUT_OF_RANGE;
  for (int64_t r = 0; r < rows; ++r)
    if (positions[r] < 0 || examples[r] < 0 || examples[r] >= 1 << 16) return VOX_OUT_OF_RANGE;
  vox::FlushScope flush;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t k = 0; k < width; ++k) {
      const Words counter = {{static_cast<uint32_t>(positions[r]),
                              static_cast<uint32_t>(examples[r]) * 65536u + static_cast<uint32_t>(k / 4),
                              4u + 65536u * layer, step}};
      const uint32_t word = philox(seed, counter).word[k % 4];
      const float scaled = x[r * width + k] * factor;
      out[r * width + k] = word < threshold ? 0.0f : scaled;
    }
  return first_fault(out, rows, width);
}

int64_t ref_sum_of_squares(const float* x, int64_t elements, float* out) {
  vox::FlushScope flush;
  *out = c128(x, x, elements);
  return is_finite(*out) ? 0 : 1;
}

int64_t ref_adamw(float* parameter, const float* gradient, float* m, float* v, int64_t rows, int64_t width,
                  const float* constants) {
  vox::FlushScope flush;
  const float learning_rate = constants[0], beta1 = constants[1], one_minus_beta1 = constants[2];
  const float beta2 = constants[3], one_minus_beta2 = constants[4], eps = constants[5], decay = constants[6];
  const float correction1 = constants[7], correction2 = constants[8];
  int64_t fault = 0;
  for (int64_t i = 0; i < rows * width; ++i) {
    const float g = gradient[i];
    const float new_m = one_minus_beta1 * g;
    m[i] = fmaf(beta1, m[i], new_m);
    const float square = g * g;
    const float new_v = one_minus_beta2 * square;
    v[i] = fmaf(beta2, v[i], new_v);
    const float variance = v[i] / correction2;
    const float root = sqrtf(variance);
    const float below = root + eps;
    const float mean = m[i] / correction1;
    const float direction = mean / below;
    const float decayed = parameter[i] * decay;
    const float step = learning_rate * direction;
    parameter[i] = decayed - step;
    if (fault == 0 && !(is_finite(parameter[i]) && is_finite(m[i]) && is_finite(v[i]))) fault = 1 + i / width;
  }
  return fault;
}
}
