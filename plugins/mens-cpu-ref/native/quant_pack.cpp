#include "quant_pack.h"

#include <string.h>

#include "quant_formats.h"

namespace vox {
namespace quant {
namespace {

uint32_t load_u32(const uint8_t* p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}
uint16_t load_u16(const uint8_t* p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}
void store_u32(uint8_t* p, uint32_t v) { memcpy(p, &v, 4); }
bool is_finite_f16(uint16_t h) { return (h & 0x7C00) != 0x7C00; }

// Four file bytes of one row become its place in a k-group; `to` is the first k-group's.
void spread(const uint8_t* from, int k_groups, uint8_t* to, uint32_t flip = 0) {
  for (int g = 0; g < k_groups; ++g) store_u32(to + g * kKGroupBytes, load_u32(from + 4 * g) ^ flip);
}

// Bit i of `bits` belongs to column i; the plane wants, for column 4 g + t, bit g of byte t.
uint32_t plane_of(uint32_t bits) {
  uint32_t plane = 0;
  for (int t = 0; t < 4; ++t) {
    uint32_t b = (bits >> t) & 0x11111111u;
    b = (b | b >> 3) & 0x03030303u;
    b = (b | b >> 6) & 0x000F000Fu;
    b = (b | b >> 12) & 0x000000FFu;
    plane |= b << (8 * t);
  }
  return plane;
}

// The twelve bytes of 6-bit scales and mins of Q4_K and Q5_K.
void unpack_scales(const uint8_t* s, uint8_t* scales, uint8_t* mins) {
  for (int j = 0; j < 4; ++j) {
    scales[j] = s[j] & 63;
    mins[j] = s[j + 4] & 63;
    scales[j + 4] = static_cast<uint8_t>((s[j + 8] & 15) | (s[j] >> 6) << 4);
    mins[j + 4] = static_cast<uint8_t>((s[j + 8] >> 4) | (s[j + 4] >> 6) << 4);
  }
}

// One block of one row into lane `row` of its record; returns whether its scales are finite.
// `d16` is the lane's first scale, `d16[16]` its second.
bool pack_block(int32_t format, const uint8_t* file, int row, uint8_t* record, uint8_t* d16) {
  uint8_t* lane = record + 4 * row;  // this row's bytes in the first k-group
  uint16_t d = load_u16(file), dmin = 0;
  switch (format) {
    case kQ8_0:
      spread(file + 2, 8, lane, 0x80808080u);
      break;
    case kQ4_0:
      spread(file + 2, 4, lane);
      break;
    case kQ5_0:
      spread(file + 6, 4, lane);
      store_u32(lane + RecordQ5_0::high, plane_of(load_u32(file + 2)));
      break;
    case kQ4_K:
    case kQ5_K: {
      uint8_t scales[8], mins[8];
      unpack_scales(file + 4, scales, mins);
      const bool is_q4 = format == kQ4_K;
      const int scales_at = is_q4 ? int{RecordQ4_K::scales} : int{RecordQ5_K::scales};
      const int mins_at = is_q4 ? int{RecordQ4_K::mins} : int{RecordQ5_K::mins};
      for (int j = 0; j < 8; ++j) {
        record[scales_at + 16 * j + row] = scales[j];
        record[mins_at + 32 * (j / 2) + 2 * row + j % 2] = mins[j];
      }
      const uint8_t* codes = file + 16;
      if (!is_q4) {
        for (int j = 0; j < 8; ++j) {
          uint32_t bits = 0;
          for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(codes[i] >> j & 1) << i;
          store_u32(lane + RecordQ5_K::high + j * kKGroupBytes, plane_of(bits));
        }
        codes += 32;
      }
      spread(codes, 32, lane);
      dmin = load_u16(file + 2);
      memcpy(d16 + 32, &dmin, 2);
      break;
    }
    case kQ6_K:
      spread(file, 32, lane);
      spread(file + 128, 16, lane + RecordQ6_K::high);
      for (int j = 0; j < 16; ++j) record[RecordQ6_K::scales + 16 * j + row] = file[192 + j];
      d = load_u16(file + 208);
      break;
    default:
      break;
  }
  memcpy(d16, &d, 2);
  return is_finite_f16(d) && is_finite_f16(dmin);
}

float f16_to_f32(uint16_t h) {
  const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
  uint32_t bits = sign | (exponent + 112) << 23 | mantissa << 13;
  if (exponent == 31) bits = sign | 0x7F800000u | mantissa << 13;
  if (exponent == 0) {  // zero, or a subnormal half: mantissa * 2^-24, exact
    const float value = static_cast<float>(mantissa) * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

int nibble(const uint8_t* codes, int k_group, int row, int t, bool high) {
  const uint8_t byte = codes[k_group * kKGroupBytes + 4 * row + t];
  return high ? byte >> 4 : byte & 15;
}

// One block of lane `row` to float32, in GGML's order of operations, each rounded once.
void unpack_block(int32_t format, const uint8_t* record, const uint8_t* d16, int row, float* out) {
  const float d = f16_to_f32(load_u16(d16));
  if (layout_of(format).block == 32) {
    const int plane_at = 4 * row;
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4;
      int q;
      if (format == kQ8_0) {
        q = record[g * kKGroupBytes + plane_at + t] - 128;
      } else {
        q = nibble(record, g % 4, row, t, g >= 4);
        if (format == kQ5_0) q = (q | (record[RecordQ5_0::high + plane_at + t] >> g & 1) << 4) - 16;
        else q -= 8;
      }
      out[i] = static_cast<float>(q) * d;
    }
    return;
  }
  if (format == kQ6_K) {
    for (int i = 0; i < 256; ++i) {
      const int part = i / 128, quarter = i / 32 % 4, g = i / 4 % 8, t = i % 4;
      const int low = nibble(record, part * 16 + (quarter & 1) * 8 + g, row, t, quarter >= 2);
      const int high = record[RecordQ6_K::high + (part * 8 + g) * kKGroupBytes + 4 * row + t] >> (2 * quarter) & 3;
      const float scaled = d * static_cast<float>(static_cast<int8_t>(record[RecordQ6_K::scales + 16 * (i / 16) + row]));
      out[i] = scaled * static_cast<float>((low | high << 4) - 32);
    }
    return;
  }
  const bool is_q4 = format == kQ4_K;
  const int scales_at = is_q4 ? int{RecordQ4_K::scales} : int{RecordQ5_K::scales};
  const int mins_at = is_q4 ? int{RecordQ4_K::mins} : int{RecordQ5_K::mins};
  const float dmin = f16_to_f32(load_u16(d16 + 32));
  for (int j = 0; j < 8; ++j) {
    const float scale = d * static_cast<float>(record[scales_at + 16 * j + row]);
    const float minimum = dmin * static_cast<float>(record[mins_at + 32 * (j / 2) + 2 * row + j % 2]);
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4;
      int q = nibble(record, j / 2 * 8 + g, row, t, j % 2 == 1);
      if (!is_q4) q |= (record[RecordQ5_K::high + j * kKGroupBytes + 4 * row + t] >> g & 1) << 4;
      out[32 * j + i] = scale * static_cast<float>(q) - minimum;
    }
  }
}

}  // namespace

int64_t pack_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const PackTask*>(opaque);
  const Layout layout = layout_of(task.format);
  const int64_t blocks = task.columns / layout.block;
  int64_t fault = 0;
  for (int64_t group = begin; group < end; ++group) {
    uint8_t* scales = task.packed + group * group_bytes(layout, blocks);
    uint8_t* records = scales + scale_plane_bytes(layout.scale_bytes, blocks);
    const int64_t first = group * kGroupRows;
    const int rows = static_cast<int>(task.rows - first < kGroupRows ? task.rows - first : kGroupRows);
    for (int64_t b = 0; b < blocks; ++b)
      for (int row = 0; row < rows; ++row) {
        const uint8_t* file = task.file + ((first + row) * blocks + b) * layout.file_bytes;
        const bool is_finite = pack_block(task.format, file, row, records + b * layout.record_bytes,
                                          scales + b * layout.scale_bytes + 2 * row);
        if (!is_finite && (fault == 0 || first + row + 1 < fault)) fault = first + row + 1;
      }
  }
  return fault;
}

int64_t rows_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const RowsTask*>(opaque);
  const Layout layout = layout_of(task.format);
  const int64_t blocks = task.columns / layout.block;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t group = task.ids[i] / kGroupRows;
    const int row = task.ids[i] % kGroupRows;
    const uint8_t* scales = task.packed + group * group_bytes(layout, blocks);
    const uint8_t* records = scales + scale_plane_bytes(layout.scale_bytes, blocks);
    float* out = task.out + i * task.columns;
    for (int64_t b = 0; b < blocks; ++b)
      unpack_block(task.format, records + b * layout.record_bytes, scales + b * layout.scale_bytes + 2 * row, row,
                   out + b * layout.block);
    if (task.scale != nullptr)
      for (int64_t c = 0; c < task.columns; ++c) out[c] = out[c] * *task.scale;
    for (int64_t c = 0; c < task.columns; ++c)
      if (!(out[c] - out[c] == 0.0f)) return 1 + i;
  }
  return 0;
}

}  // namespace quant
}  // namespace vox
