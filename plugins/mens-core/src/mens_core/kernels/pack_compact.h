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
    uint16_t words[2][2 * kPanel];  // two columns, then two more: [row][2] each
    for (int64_t i = 0; i < 2 * kPanel; ++i) words[0][i] = words[1][i] = (uint16_t)(filler << 8);
    for (int64_t c = 0; c < 4; c += 2)
      for (int64_t r = 0; r < rows; ++r) {
        const uint16_t* from = source + r * inputs + column + c;
        if (column + c + 1 < inputs) __builtin_memcpy(words[c / 2] + 2 * r, from, 4);
        else if (column + c < inputs) words[c / 2][2 * r] = *from;
      }
    for (int64_t q = 0; q < 4; ++q)
      for (int64_t c = 0; c < 2; ++c)
        for (int64_t i = 0; i < 8; ++i) {
          lower[16 * q + 8 * c + i] = (uint8_t)words[c][8 * q + i];
          upper[16 * q + 8 * c + i] = (uint8_t)(words[c][8 * q + i] >> 8);
        }
  }
};

// The code of each of 64 upper bytes; returns whether all are in the table.
static inline bool compact_codes(const uint8_t* table, const uint8_t* upper, uint8_t* codes) {
  uint8_t missing[compact::kHalfBytes];
  for (int64_t i = 0; i < compact::kHalfBytes; ++i) {
    codes[i] = 0;
    missing[i] = 1;
  }
  for (int t = 0; t < 16; ++t)
    for (int64_t i = 0; i < compact::kHalfBytes; ++i) {
      const bool here = upper[i] == table[t];
      codes[i] = here ? (uint8_t)t : codes[i];
      missing[i] = here ? 0 : missing[i];
    }
  uint8_t any = 0;
  for (int64_t i = 0; i < compact::kHalfBytes; ++i) any |= missing[i];
  return any == 0;
}

// Which of a half's four columns have an upper byte that is not in the table; bit c: column c.
static inline unsigned kept_columns(const uint8_t* table, const uint8_t* upper) {
  unsigned columns = 0;
  for (int64_t r = 0; r < kPanel; ++r)
    for (int64_t c = 0; c < 4; ++c) {
      bool here = false;
      for (int t = 0; t < 16; ++t) here = here || table[t] == upper[compact::place_of(r, c)];
      columns |= here ? 0u : 1u << c;
    }
  return columns;
}

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

static int64_t compact_measure_part(const void* opaque, int64_t begin, int64_t end, void*) {
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
    int64_t kept = 0;
    if (found != rows.rows * task.inputs)
      for (int64_t k = 0; k < task.inputs; k += 4) {
        uint8_t lower[compact::kHalfBytes], upper[compact::kHalfBytes], codes[compact::kHalfBytes];
        rows.half(k, table[0], lower, upper);
        if (!compact_codes(table, upper, codes)) kept += __builtin_popcount(kept_columns(table, upper));
      }
    task.kept[panel] = kept;
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
        uint8_t upper[compact::kHalfBytes];
        rows.half(column, table[0], at + h * compact::kHalfBytes, upper);
        if (compact_codes(table, upper, codes[h])) continue;
        const unsigned columns = kept_columns(table, upper);
        chunk.blocks = (uint16_t)(chunk.blocks | 1u << block % compact::kChunkBlocks);
        for (int64_t c = 0; c < 4; ++c) {
          if (!(columns >> c & 1)) continue;
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
