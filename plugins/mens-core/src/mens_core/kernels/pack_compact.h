// A bf16 matrix into twelve bits a weight (compact_layout.h), in two passes: what each panel needs, then the panels.
#pragma once
#include "compact_layout.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

struct CompactRows {  // those of a panel
  const uint16_t* source;
  int64_t rows, inputs;

  CompactRows(const void* from, int64_t outputs, int64_t columns, int64_t panel)
      : source(static_cast<const uint16_t*>(from) + panel * kPanel * columns),
        rows(outputs - panel * kPanel < kPanel ? outputs - panel * kPanel : kPanel),
        inputs(columns) {}

  // Four columns from `column` on, in the order of a half of a block. Where there is no row or column the upper
  // byte is `filler`, one of the table's: nobody reads those weights.
  void half(int64_t column, uint8_t filler, uint8_t* lower, uint8_t* upper) const {
    const int64_t columns = inputs - column < 4 ? inputs - column : 4;
    for (int64_t r = 0; r < kPanel; ++r) {
      uint64_t words = filler * 0x0100010001000100u;
      if (r < rows && columns == 4) __builtin_memcpy(&words, source + r * inputs + column, 8);
      else if (r < rows && columns > 0) __builtin_memcpy(&words, source + r * inputs + column, (size_t)columns * 2);
      put_pairs(words, lower + compact::place_of(r, 0), lower + compact::place_of(r, 2));
      put_pairs(words >> 8, upper + compact::place_of(r, 0), upper + compact::place_of(r, 2));
    }
  }

 private:
  // The lower bytes of four words, two to each place.
  static inline void put_pairs(uint64_t words, uint8_t* first, uint8_t* last) {
    const uint64_t bytes = words & 0x00FF00FF00FF00FFu;
    const uint64_t pairs = bytes | bytes >> 8;
    const uint16_t a = (uint16_t)pairs, b = (uint16_t)(pairs >> 32);
    __builtin_memcpy(first, &a, 2);
    __builtin_memcpy(last, &b, 2);
  }
};

// The code of each upper byte; kMissing where the table has none.
struct CompactCodes {
  static constexpr uint8_t kMissing = 0x80;
  uint8_t of[256];

  explicit CompactCodes(const uint8_t* table) {
    for (int v = 0; v < 256; ++v) of[v] = kMissing;
    for (int t = 0; t < compact::kRows; ++t) of[table[t]] = (uint8_t)t;
  }
};

// The sixteen upper bytes that a panel has most of, of equals the lower, in ascending order.
static void choose_table(const uint32_t* counts, uint8_t* table) {
  bool chosen[256] = {};
  for (int t = 0; t < 16; ++t) {
    int best = -1;
    for (int v = 0; v < 256; ++v)
      if (!chosen[v] && (best < 0 || counts[v] > counts[best])) best = v;
    chosen[best] = true;
  }
  for (int v = 0, t = 0; v < 256; ++v)
    if (chosen[v]) table[t++] = (uint8_t)v;
}

// `scratch`: a byte for each column.
static int64_t compact_measure_part(const void* opaque, int64_t begin, int64_t end, void* scratch) {
  const auto& task = *static_cast<const CompactMeasureTask*>(opaque);
  int64_t fault = 0;
  for (int64_t panel = begin; panel < end; ++panel) {
    const CompactRows rows(task.source, task.outputs, task.inputs, panel);
    uint32_t even[256] = {}, odd[256] = {};
    for (int64_t r = 0; r < rows.rows; ++r) {
      const uint16_t* from = rows.source + r * task.inputs;
      bool finite = true;
      int64_t k = 0;
      for (; k + 1 < task.inputs; k += 2) {
        ++even[from[k] >> 8];
        ++odd[from[k + 1] >> 8];
      }
      if (k < task.inputs) ++even[from[k] >> 8];
      // Infinity and NaN have the exponent full, so the upper byte 7F or FF: only then is a row looked at.
      if (even[0x7F] + odd[0x7F] + even[0xFF] + odd[0xFF] != 0)
        for (int64_t i = 0; i < task.inputs; ++i) finite = finite && (from[i] & 0x7F80) != 0x7F80;
      if (!finite && fault == 0) fault = 1 + panel * kPanel + r;
    }
    for (int v = 0; v < 256; ++v) even[v] += odd[v];
    uint8_t* table = task.tables + panel * compact::kRows;
    choose_table(even, table);
    uint32_t found = 0;
    for (int t = 0; t < 16; ++t) found += even[table[t]];
    task.kept[panel] = 0;
    if (found == rows.rows * task.inputs) continue;
    const CompactCodes codes(table);
    auto* missing = static_cast<uint8_t*>(scratch);
    __builtin_memset(missing, 0, (size_t)task.inputs);
    for (int64_t r = 0; r < rows.rows; ++r)
      for (int64_t k = 0; k < task.inputs; ++k)
        missing[k] = (uint8_t)(missing[k] | codes.of[rows.source[r * task.inputs + k] >> 8]);
    for (int64_t k = 0; k < task.inputs; ++k) task.kept[panel] += missing[k] >= CompactCodes::kMissing;
  }
  return fault;
}

static int64_t compact_pack_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const CompactPackTask*>(opaque);
  auto* packed = static_cast<uint8_t*>(task.packed);
  const int64_t stride = compact::panel_bytes(task.inputs), header = compact::header_bytes(task.inputs);
  auto* all = reinterpret_cast<compact::Kept*>(packed + compact::panels_of(task.outputs) * stride);
  for (int64_t panel = begin; panel < end; ++panel) {
    const CompactRows rows(task.source, task.outputs, task.inputs, panel);
    const uint8_t* table = task.tables + panel * compact::kRows;
    const CompactCodes code(table);
    uint8_t* to = packed + panel * stride;
    __builtin_memset(to, 0, (size_t)header);
    __builtin_memcpy(to, table, (size_t)compact::kRows);
    auto* chunks = reinterpret_cast<compact::Chunk*>(to + compact::kRows);
    int64_t next = task.firsts[panel];
    for (int64_t block = 0; block < compact::blocks_of(task.inputs); ++block) {
      compact::Chunk& chunk = chunks[block / compact::kChunkBlocks];
      if (block % compact::kChunkBlocks == 0) chunk.kept = (uint32_t)next;
      uint8_t* at = to + header + block * compact::kBlockBytes;
      uint8_t codes[2][compact::kHalfBytes];
      for (int64_t h = 0; h < 2; ++h) {
        const int64_t column = block * compact::kColumns + 4 * h;
        uint8_t upper[compact::kHalfBytes], any = 0;
        rows.half(column, table[0], at + h * compact::kHalfBytes, upper);
        for (int64_t i = 0; i < compact::kHalfBytes; ++i) {
          codes[h][i] = code.of[upper[i]];
          any = (uint8_t)(any | codes[h][i]);
        }
        if (any < CompactCodes::kMissing) continue;
        chunk.blocks = (uint16_t)(chunk.blocks | 1u << block % compact::kChunkBlocks);
        for (int64_t c = 0; c < 4; ++c) {
          bool is_kept = false;
          for (int64_t r = 0; r < kPanel; ++r) {
            uint8_t& one = codes[h][compact::place_of(r, c)];
            is_kept = is_kept || one == CompactCodes::kMissing;
            one = one & 15;
          }
          if (!is_kept) continue;
          compact::Kept& kept = all[next++];
          for (int64_t r = 0; r < kPanel; ++r) kept.upper[r] = upper[compact::place_of(r, c)];
          kept.column = (uint32_t)(column + c);
        }
      }
      for (int64_t i = 0; i < compact::kHalfBytes; ++i)
        at[2 * compact::kHalfBytes + i] = (uint8_t)(codes[0][i] | codes[1][i] << 4);
    }
    chunks[compact::chunks_of(task.inputs)].kept = (uint32_t)next;
  }
  return 0;
}

}  // namespace VOX_ISA
}  // namespace vox
