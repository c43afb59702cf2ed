// The scalar reference of the quantised operators, on raw GGML blocks (docs/numerics.md).
//
// Plain loops that define the bits. It includes nothing of the kernel source and knows nothing of
// the packed form. Every float operation is written alone and rounded once.
#include "quant_abi.h"

#include <string.h>

#include <vector>

#include "flush.h"

namespace {

// A block of a file, spelt out: weight i is scale * code[i] - minimum of its sub-block.
struct Block {
  float d = 0.0f, dmin = 0.0f;
  int scale[16] = {};  // of each sub-block; formats of 32 have none
  int minimum[8] = {};
  int code[256] = {};  // signed: the format's offset is taken off
};

struct Shape {
  int columns;      // of a block
  int bytes;        // of a block
  int sub_columns;  // of a sub-block
};

Shape shape_of(int format) {
  const Shape shapes[6] = {{32, 34, 32}, {32, 22, 32}, {32, 18, 32}, {256, 144, 32}, {256, 176, 32}, {256, 210, 16}};
  return shapes[format];
}

float half_to_float(const uint8_t* p) {
  const int bits = p[0] | p[1] << 8, exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float value;
  if (exponent == 31) {
    const uint32_t special = 0x7F800000u | static_cast<uint32_t>(mantissa) << 13;
    memcpy(&value, &special, 4);
  } else {
    // (1024 + m) * 2^(e - 25), or m * 2^-24: exact, and never a float32 subnormal.
    value = static_cast<float>(exponent == 0 ? mantissa : 1024 + mantissa);
    for (int e = exponent == 0 ? 1 : exponent; e < 25; ++e) value = value * 0.5f;
    for (int e = 25; e < exponent; ++e) value = value * 2.0f;
  }
  return (bits & 0x8000) != 0 ? -value : value;
}

void read_q8_0(const uint8_t* p, Block& out) {
  out.d = half_to_float(p);
  for (int i = 0; i < 32; ++i) out.code[i] = static_cast<int8_t>(p[2 + i]);
}

void read_q5_0(const uint8_t* p, Block& out) {
  out.d = half_to_float(p);
  for (int i = 0; i < 32; ++i) {
    const int low = i < 16 ? p[6 + i] & 15 : p[6 + i - 16] >> 4;
    const int high = p[2 + i / 8] >> (i % 8) & 1;
    out.code[i] = (low | high << 4) - 16;
  }
}

void read_q4_0(const uint8_t* p, Block& out) {
  out.d = half_to_float(p);
  for (int i = 0; i < 32; ++i) out.code[i] = (i < 16 ? p[2 + i] & 15 : p[2 + i - 16] >> 4) - 8;
}

void read_k_scales(const uint8_t* p, Block& out) {
  for (int j = 0; j < 8; ++j) {
    if (j < 4) {
      out.scale[j] = p[j] & 63;
      out.minimum[j] = p[j + 4] & 63;
    } else {
      out.scale[j] = (p[j + 4] & 15) | (p[j - 4] >> 6) << 4;
      out.minimum[j] = p[j + 4] >> 4 | (p[j] >> 6) << 4;
    }
  }
}

void read_q4_k(const uint8_t* p, Block& out) {
  out.d = half_to_float(p);
  out.dmin = half_to_float(p + 2);
  read_k_scales(p + 4, out);
  for (int i = 0; i < 256; ++i) {
    const int byte = p[16 + i / 64 * 32 + i % 32];
    out.code[i] = i % 64 < 32 ? byte & 15 : byte >> 4;
  }
}

void read_q5_k(const uint8_t* p, Block& out) {
  out.d = half_to_float(p);
  out.dmin = half_to_float(p + 2);
  read_k_scales(p + 4, out);
  for (int i = 0; i < 256; ++i) {
    const int byte = p[48 + i / 64 * 32 + i % 32];
    const int high = p[16 + i % 32] >> (i / 32) & 1;
    out.code[i] = (i % 64 < 32 ? byte & 15 : byte >> 4) | high << 4;
  }
}

void read_q6_k(const uint8_t* p, Block& out) {
  out.d = half_to_float(p + 208);
  for (int j = 0; j < 16; ++j) out.scale[j] = static_cast<int8_t>(p[192 + j]);
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, quarter = i % 128 / 32, l = i % 32;
    const int byte = p[half * 64 + quarter % 2 * 32 + l];
    const int low = quarter < 2 ? byte & 15 : byte >> 4;
    const int high = p[128 + half * 32 + l] >> (2 * quarter) & 3;
    out.code[i] = (low | high << 4) - 32;
  }
}

Block read_block(int format, const uint8_t* p) {
  void (*const readers[6])(const uint8_t*, Block&) = {read_q8_0, read_q5_0, read_q4_0, read_q4_k, read_q5_k, read_q6_k};
  Block block;
  readers[format](p, block);
  return block;
}

bool is_k_quant(int format) { return format >= 3; }
bool has_minimum(int format) { return format == 3 || format == 4; }
bool is_finite(float a) { return a - a == 0.0f; }

// Rounds to an integer, ties to even; |v| < 2^22.
int round_to_even(float v) {
  int n = static_cast<int>(v);  // towards zero
  const float rest = v - static_cast<float>(n);
  if (rest > 0.5f || (rest == 0.5f && n % 2 != 0)) n += 1;
  if (rest < -0.5f || (rest == -0.5f && n % 2 != 0)) n -= 1;
  return n;
}

void quantise(int block, const float* x, int8_t* codes, float* scale) {
  float amax = 0.0f;
  bool all_finite = true;
  for (int i = 0; i < block; ++i) {
    const float a = x[i] < 0.0f ? -x[i] : x[i];
    if (!is_finite(x[i])) all_finite = false;
    if (a > amax) amax = a;
  }
  for (int i = 0; i < block; ++i) codes[i] = 0;
  *scale = 0.0f;
  if (!all_finite) {
    const uint32_t nan = 0x7FC00000u;
    memcpy(scale, &nan, 4);
    return;
  }
  const float d = amax / 127.0f;
  if (d == 0.0f) return;
  const float id = 127.0f / amax;
  for (int i = 0; i < block; ++i) codes[i] = static_cast<int8_t>(round_to_even(x[i] * id));
  *scale = d;
}

// One output: weights `w` of a row, one row of activations.
float dot(int format, const std::vector<Block>& w, const int8_t* codes, const float* scales) {
  const Shape shape = shape_of(format);
  const int blocks = static_cast<int>(w.size());
  float y = 0.0f, p = 0.0f;
  if (!is_k_quant(format)) {
    for (int b = 0; b < blocks; ++b) {
      if (b % 4 == 0) p = 0.0f;
      int32_t s = 0;
      for (int i = 0; i < 32; ++i) s += w[b].code[i] * codes[b * 32 + i];
      const float d = w[b].d * scales[b];
      p = __builtin_fmaf(d, static_cast<float>(s), p);
      if (b % 4 == 3 || b == blocks - 1) y = b < 4 ? p : y + p;
    }
    return y;
  }
  for (int b = 0; b < blocks; ++b) {
    int32_t u = 0, v = 0;
    for (int j = 0; j < 256 / shape.sub_columns; ++j) {
      int32_t s = 0, a = 0;
      for (int i = j * shape.sub_columns; i < (j + 1) * shape.sub_columns; ++i) {
        s += w[b].code[i] * codes[b * 256 + i];
        a += codes[b * 256 + i];
      }
      u += w[b].scale[j] * s;
      if (has_minimum(format)) v += w[b].minimum[j] * a;
    }
    const float d = w[b].d * scales[b];
    p = __builtin_fmaf(d, static_cast<float>(u), 0.0f);
    if (has_minimum(format)) {
      const float dmin = w[b].dmin * scales[b];
      p = __builtin_fmaf(-dmin, static_cast<float>(v), p);
    }
    y = b == 0 ? p : y + p;
  }
  return y;
}

}  // namespace

extern "C" {

// The reference keeps weights as they are in the file, and activations as codes, then scales.

int64_t ref_quant_file_bytes(int32_t format, int64_t rows, int64_t columns) {
  if (format < 0 || format > 5 || rows <= 0 || columns <= 0) return -1;
  const Shape shape = shape_of(format);
  return columns % shape.columns == 0 ? rows * (columns / shape.columns) * shape.bytes : -1;
}

int64_t ref_quant_packed_bytes(int32_t format, int64_t rows, int64_t columns) {
  return ref_quant_file_bytes(format, rows, columns);
}

int64_t ref_quant_activation_bytes(int32_t block, int64_t rows, int64_t columns) {
  if ((block != 32 && block != 256) || rows <= 0 || columns <= 0 || columns % block != 0) return -1;
  return rows * columns + rows * (columns / block) * 4;
}

int64_t ref_quant_pack(int32_t format, const uint8_t* file, int64_t rows, int64_t columns, uint8_t* packed) {
  const Shape shape = shape_of(format);
  const int64_t blocks = columns / shape.columns;
  memcpy(packed, file, static_cast<size_t>(rows * blocks * shape.bytes));
  for (int64_t i = 0; i < rows * blocks; ++i) {
    const Block block = read_block(format, file + i * shape.bytes);
    if (!is_finite(block.d) || !is_finite(block.dmin)) return 1 + i / blocks;
  }
  return 0;
}

int64_t ref_quant_activations(int32_t block, const float* x, int64_t rows, int64_t columns, uint8_t* activations) {
  vox::FlushScope flush;
  int8_t* codes = reinterpret_cast<int8_t*>(activations);
  for (int64_t b = 0; b < rows * (columns / block); ++b) {
    float scale;
    quantise(block, x + b * block, codes + b * block, &scale);
    memcpy(activations + rows * columns + 4 * b, &scale, 4);
  }
  return 0;
}

int64_t ref_quant_linear(int32_t format, const uint8_t* packed, int64_t outputs, int64_t columns,
                         const uint8_t* activations, int64_t rows, float* y) {
  vox::FlushScope flush;
  const Shape shape = shape_of(format);
  const int64_t blocks = columns / shape.columns;
  const int8_t* codes = reinterpret_cast<const int8_t*>(activations);
  std::vector<float> scales(static_cast<size_t>(rows * blocks));
  memcpy(scales.data(), activations + rows * columns, scales.size() * 4);
  std::vector<Block> w(static_cast<size_t>(blocks));
  for (int64_t n = 0; n < outputs; ++n) {
    for (int64_t b = 0; b < blocks; ++b)
      w[static_cast<size_t>(b)] = read_block(format, packed + (n * blocks + b) * shape.bytes);
    for (int64_t r = 0; r < rows; ++r)
      y[r * outputs + n] = dot(format, w, codes + r * columns, scales.data() + r * blocks);
  }
  for (int64_t i = 0; i < rows * outputs; ++i)
    if (!is_finite(y[i])) return 1 + i / outputs;
  return 0;
}

int64_t ref_quant_rows(int32_t format, const uint8_t* packed, int64_t rows, int64_t columns, const int32_t* ids,
                       int64_t count, float scale, float* out) {
  for (int64_t r = 0; r < count; ++r)
    if (ids[r] < 0 || ids[r] >= rows) return VOX_OUT_OF_RANGE;
  vox::FlushScope flush;
  const Shape shape = shape_of(format);
  const int64_t blocks = columns / shape.columns;
  int64_t fault = 0;
  for (int64_t r = 0; r < count; ++r)
    for (int64_t b = 0; b < blocks; ++b) {
      const Block w = read_block(format, packed + (ids[r] * blocks + b) * shape.bytes);
      for (int i = 0; i < shape.columns; ++i) {
        const int j = i / shape.sub_columns;
        float value = static_cast<float>(w.code[i]);
        if (is_k_quant(format)) {
          const float scaled = w.d * static_cast<float>(w.scale[j]);
          value = scaled * value;
        } else {
          value = value * w.d;
        }
        if (has_minimum(format)) {
          const float minimum = w.dmin * static_cast<float>(w.minimum[j]);
          value = value - minimum;
        }
        value = value * scale;
        out[r * columns + b * shape.columns + i] = value;
        if (!is_finite(value) && fault == 0) fault = 1 + r;
      }
    }
  return fault;
}
}
