#include "quant_pack.h"

#include <string.h>

#include "definitions.h"
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

// Bit `bit` of each of 32 bytes.
uint32_t gather_bits(const uint8_t* bytes, int bit) {
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(bytes[i] >> bit & 1) << i;
  return bits;
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

// Offsets that Q4_K and Q5_K have in common.
static_assert(int{RecordQ4_K::scales} == int{RecordQ5_K::scales} && int{RecordQ4_K::mins} == int{RecordQ5_K::mins} &&
              int{RecordQ4_K::parts} == int{RecordQ5_K::parts});
int scale_at(int sub, int row) { return RecordQ4_K::scales + 16 * sub + row; }
int min_at(int sub, int row) { return RecordQ4_K::mins + 32 * (sub / 2) + 2 * row + sub % 2; }

void pack_k_scales(const uint8_t* file, int row, uint8_t* record) {
  uint8_t scales[8], mins[8];
  unpack_scales(file + 4, scales, mins);
  for (int j = 0; j < 8; ++j) {
    record[scale_at(j, row)] = scales[j];
    record[min_at(j, row)] = mins[j];
  }
}

// The upper or the lower four bits of 32 codes, as nibbles of columns i and i + 16.
void spread_half(const uint8_t* codes, bool upper, uint8_t* to) {
  for (int i = 0; i < 16; ++i) {
    const int first = codes[i] ^ 0x80, second = codes[i + 16] ^ 0x80;
    const int nibbles = upper ? first >> 4 | (second & 0xF0) : (first & 15) | (second & 15) << 4;
    to[i / 4 * kKGroupBytes + i % 4] = static_cast<uint8_t>(nibbles);
  }
}

// One block of one row into its row's bytes of the record.
void pack_record(int32_t format, const uint8_t* file, int row, uint8_t* record) {
  uint8_t* lane = record + 4 * row;  // this row's bytes, were the record one k-group
  switch (format) {
    case kQ8_0Upper:
    case kQ8_0Lower:
      return spread_half(file + 2, format == kQ8_0Upper, lane);
    case kQ8_0:
      return spread(file + 2, 8, lane, 0x80808080u);
    case kQ4_0:
      return spread(file + 2, 4, lane);
    case kQ5_0:
      store_u32(lane + RecordQ5_0::high, plane_of(load_u32(file + 2)));
      return spread(file + 6, 4, lane + RecordQ5_0::codes);
    case kQ4_K:
      pack_k_scales(file, row, record);
      for (int i = 0; i < 4; ++i)
        spread(file + 16 + 32 * i, 8, lane + RecordQ4_K::parts + i * RecordQ4_K::part_bytes);
      return;
    case kQ5_K:
      pack_k_scales(file, row, record);
      for (int i = 0; i < 4; ++i) {
        uint8_t* part = lane + RecordQ5_K::parts + i * RecordQ5_K::part_bytes;
        for (int j = 0; j < 2; ++j)
          store_u32(part + RecordQ5_K::part_high + j * kKGroupBytes, plane_of(gather_bits(file + 16, 2 * i + j)));
        spread(file + 48 + 32 * i, 8, part + RecordQ5_K::part_codes);
      }
      return;
    case kQ6_K:
      for (int i = 0; i < 4; ++i) {
        const int half = i / 2, run = 16 * (i % 2);  // of 128 columns; first byte of the part's 16 columns
        uint8_t* part = record + RecordQ6_K::parts + i * RecordQ6_K::part_bytes;
        for (int j = 0; j < 4; ++j) part[RecordQ6_K::part_scales + 16 * j + row] = file[192 + 8 * half + 2 * j + i % 2];
        spread(file + 128 + 32 * half + run, 4, part + RecordQ6_K::part_high + 4 * row);
        spread(file + 64 * half + run, 4, part + RecordQ6_K::part_codes + 4 * row);
        spread(file + 64 * half + 32 + run, 4, part + RecordQ6_K::part_codes + 4 * kKGroupBytes + 4 * row);
      }
      return;
    default:
      return;
  }
}

// One row's scales of a block; returns whether they are finite.
bool pack_scales(int32_t format, const uint8_t* file, int row, uint8_t* scales) {
  const uint16_t d = load_u16(format == kQ6_K ? file + 208 : file);
  memcpy(scales + 2 * row, &d, 2);
  if (format != kQ4_K && format != kQ5_K) return is_finite_f16(d);
  const uint16_t dmin = load_u16(file + 2);
  memcpy(scales + 32 + 2 * row, &dmin, 2);
  return is_finite_f16(d) && is_finite_f16(dmin);
}

int nibble(const uint8_t* codes, int k_group, int row, int t, bool high) {
  const uint8_t byte = codes[k_group * kKGroupBytes + 4 * row + t];
  return high ? byte >> 4 : byte & 15;
}

void unpack32(int32_t format, const uint8_t* record, const uint8_t* lower, float d, int row, float* out) {
  for (int i = 0; i < 32; ++i) {
    const int g = i / 4, t = i % 4;
    int q = 0;
    if (format == kQ8_0) q = record[g * kKGroupBytes + 4 * row + t] - 128;
    if (format == kQ8_0Upper) q = (nibble(record, g % 4, row, t, g >= 4) << 4 | nibble(lower, g % 4, row, t, g >= 4)) - 128;
    if (format == kQ4_0) q = nibble(record, g % 4, row, t, g >= 4) - 8;
    if (format == kQ5_0) {
      const int high = record[RecordQ5_0::high + 4 * row + t] >> g & 1;
      q = (nibble(record + RecordQ5_0::codes, g % 4, row, t, g >= 4) | high << 4) - 16;
    }
    out[i] = scalar::weight_of(d, q);
  }
}

void unpack_with_min(int32_t format, const uint8_t* record, float d, float dmin, int row, float* out) {
  for (int j = 0; j < 8; ++j) {
    const int scale = record[scale_at(j, row)], minimum = record[min_at(j, row)];
    const int part_bytes = format == kQ4_K ? int{RecordQ4_K::part_bytes} : int{RecordQ5_K::part_bytes};
    const uint8_t* part = record + RecordQ4_K::parts + j / 2 * part_bytes;
    const uint8_t* codes = format == kQ4_K ? part : part + RecordQ5_K::part_codes;
    for (int i = 0; i < 32; ++i) {
      const int g = i / 4, t = i % 4;
      int q = nibble(codes, g, row, t, j % 2 == 1);
      if (format == kQ5_K) q |= (part[RecordQ5_K::part_high + j % 2 * kKGroupBytes + 4 * row + t] >> g & 1) << 4;
      out[32 * j + i] = scalar::weight_of(d, scale, q, dmin, minimum);
    }
  }
}

void unpack_q6_k(const uint8_t* record, float d, int row, float* out) {
  for (int c = 0; c < 256; ++c) {
    const int quarter = c / 32 % 4, g = c / 4 % 4, t = c % 4;
    const uint8_t* part = record + RecordQ6_K::parts + (c / 128 * 2 + c / 16 % 2) * RecordQ6_K::part_bytes;
    const int low = nibble(part + RecordQ6_K::part_codes, quarter % 2 * 4 + g, row, t, quarter >= 2);
    const int high = part[RecordQ6_K::part_high + g * kKGroupBytes + 4 * row + t] >> (2 * quarter) & 3;
    const auto scale = static_cast<int8_t>(part[RecordQ6_K::part_scales + 16 * quarter + row]);
    out[c] = scalar::weight_of(d, scale, (low | high << 4) - 32);
  }
}

// One block of row `row` to float32, in GGML's order of operations, each rounded once.
void unpack_block(int32_t format, const uint8_t* record, const uint8_t* lower, const uint8_t* scales, int row,
                  float* out) {
  const float d = scalar::f16_to_f32(load_u16(scales + 2 * row));
  if (layout_of(format).block == 32) unpack32(format, record, lower, d, row, out);
  else if (format == kQ6_K) unpack_q6_k(record, d, row, out);
  else unpack_with_min(format, record, d, scalar::f16_to_f32(load_u16(scales + 32 + 2 * row)), row, out);
}

}  // namespace

int64_t pack_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const PackTask*>(opaque);
  const Layout layout = layout_of(task.format);
  const int64_t blocks = task.columns / layout.block, bytes = group_bytes(layout, blocks);
  int64_t fault = 0;
  for (int64_t group = begin; group < end; ++group) {
    const int64_t first = group * kGroupRows;
    const int rows = static_cast<int>(task.rows - first < kGroupRows ? task.rows - first : kGroupRows);
    for (int64_t b = 0; b < blocks; ++b) {
      const Place place = place_of(layout, blocks, b);
      uint8_t* to = task.packed + group * bytes;
      for (int row = 0; row < rows; ++row) {
        const uint8_t* file = task.file + ((first + row) * blocks + b) * layout.file_bytes;
        pack_record(task.format, file, row, to + place.record);
        if (task.format == kQ8_0Lower || pack_scales(task.format, file, row, to + place.scales)) continue;
        if (fault == 0 || first + row + 1 < fault) fault = first + row + 1;
      }
    }
  }
  return fault;
}

int64_t rows_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const RowsTask*>(opaque);
  const Layout layout = layout_of(task.format);
  const int64_t blocks = task.columns / layout.block;
  int64_t fault = 0;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t number = task.ids[i] / kGroupRows;
    const uint8_t *group = task.packed + number * group_bytes(layout, blocks),
                  *lower = task.packed + lower_of(layout, task.rows, blocks, number);
    float* out = task.out + i * task.columns;
    for (int64_t b = 0; b < blocks; ++b) {
      const Place place = place_of(layout, blocks, b);
      unpack_block(task.format, group + place.record, lower + b * layout.lower_bytes, group + place.scales,
                   task.ids[i] % kGroupRows, out + b * layout.block);
    }
    for (int64_t c = 0; c < task.columns; ++c) out[c] = out[c] * task.scale;
    for (int64_t c = 0; c < task.columns; ++c)
      if (!(out[c] - out[c] == 0.0f) && fault == 0) fault = 1 + i;
  }
  return fault;
}

}  // namespace quant
}  // namespace vox
