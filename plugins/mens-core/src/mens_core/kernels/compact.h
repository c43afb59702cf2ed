// Reads a bf16 matrix of twelve bits a weight (compact_layout.h): every weight is the float that its bf16 widens to.
#pragma once
#include "compact_layout.h"
#include "quant_simd.h"
#include "tile.h"

namespace vox {
namespace VOX_ISA {

#if defined(VOX_ISA_AVX512)
CANON Bytes splat_table(const uint8_t* p) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
}
CANON Bytes looked_up(Bytes table, Bytes codes) { return _mm512_shuffle_epi8(table, codes); }
CANON VI zip_first(Bytes lower, Bytes upper) { return {_mm512_unpacklo_epi8(lower, upper)}; }
CANON VI zip_last(Bytes lower, Bytes upper) { return {_mm512_unpackhi_epi8(lower, upper)}; }
#elif defined(VOX_ISA_AVX2)
CANON Bytes splat_table(const uint8_t* p) {
  const __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
  return {table, table};
}
CANON Bytes looked_up(Bytes table, Bytes codes) {
  return {_mm256_shuffle_epi8(table.v, codes.v), _mm256_shuffle_epi8(table.w, codes.w)};
}
CANON VI zip_first(Bytes lower, Bytes upper) {
  return {_mm256_unpacklo_epi8(lower.v, upper.v), _mm256_unpacklo_epi8(lower.w, upper.w)};
}
CANON VI zip_last(Bytes lower, Bytes upper) {
  return {_mm256_unpackhi_epi8(lower.v, upper.v), _mm256_unpackhi_epi8(lower.w, upper.w)};
}
#else
CANON Bytes splat_table(const uint8_t* p) {
  const uint8x16_t table = vld1q_u8(p);
  return {{table, table, table, table}};
}
CANON Bytes looked_up(Bytes table, Bytes codes) {
  Bytes r;
  for (int i = 0; i < 4; ++i) r.v[i] = vqtbl1q_u8(table.v[i], codes.v[i]);
  return r;
}
CANON VI zip_first(Bytes lower, Bytes upper) {
  VI r;
  for (int i = 0; i < 4; ++i) r.v[i] = vreinterpretq_s32_u8(vzip1q_u8(lower.v[i], upper.v[i]));
  return r;
}
CANON VI zip_last(Bytes lower, Bytes upper) {
  VI r;
  for (int i = 0; i < 4; ++i) r.v[i] = vreinterpretq_s32_u8(vzip2q_u8(lower.v[i], upper.v[i]));
  return r;
}
#endif

// Two bf16 side by side in each lane, as floats: a bf16 is the upper half of its float.
CANON VF first_bf16(VI pair) { return f_from(i_shl<16>(pair)); }
CANON VF second_bf16(VI pair) { return f_from(i_and(pair, i_splat((int32_t)0xFFFF0000u))); }

// Columns 4 HALF to 4 HALF + 3 of a block, but for upper bytes that are not in the table.
template <int HALF>
CANON void half_block(const uint8_t* block, Bytes table, VF (&columns)[4]) {
  const Bytes codes = load_bytes(block + 2 * compact::kHalfBytes);
  const Bytes upper = looked_up(table, HALF == 0 ? low_nibbles(codes) : high_nibbles(codes));
  const Bytes lower = load_bytes(block + HALF * compact::kHalfBytes);
  const VI first = zip_first(lower, upper), last = zip_last(lower, upper);
  columns[0] = first_bf16(first);
  columns[1] = second_bf16(first);
  columns[2] = first_bf16(last);
  columns[3] = second_bf16(last);
}

// One panel of a matrix.
struct CompactPanel {
  const uint8_t* blocks;
  const compact::Chunk* chunks;
  const compact::Kept* kept;
  Bytes table;

  const uint8_t* block(int64_t number) const { return blocks + number * compact::kBlockBytes; }

  bool has_kept(int64_t number) const {
    return chunks[number / compact::kChunkBlocks].blocks >> number % compact::kChunkBlocks & 1;
  }

  // All columns of a block, as they were: [8][16].
  void read_block(int64_t number, float* to) const {
    const uint8_t* from = block(number);
    VF columns[4];
    half_block<0>(from, table, columns);
    for (int i = 0; i < 4; ++i) f_store(to + i * kLanes, columns[i]);
    half_block<1>(from, table, columns);
    for (int i = 0; i < 4; ++i) f_store(to + (4 + i) * kLanes, columns[i]);
    if (has_kept(number)) put_back(number * compact::kColumns, chunks + number / compact::kChunkBlocks, to);
  }

  // Columns [first, end), `first` at a block's beginning, up to the end of a block: [column][16].
  void read(int64_t first, int64_t end, float* to) const {
    for (int64_t k = first; k < end; k += compact::kColumns)
      read_block(k / compact::kColumns, to + (k - first) * kLanes);
  }

  // Upper bytes of the kept columns among the eight from `column` on. Those of the chunk's other blocks go where
  // nobody looks: no branch hangs on which ones they are.
  void put_back(int64_t column, const compact::Chunk* chunk, float* to) const {
    float elsewhere[kLanes];
    for (const compact::Kept* k = kept + chunk[0].kept; k != kept + chunk[1].kept; ++k) {
      const auto at = (uint64_t)((int64_t)k->column - column);
      float* place = to + at % compact::kColumns * kLanes;
      const VI rest = i_and(f_bits(f_load(place)), i_splat(0x00FFFFFF));
      f_store(at < (uint64_t)compact::kColumns ? place : elsewhere, f_from(i_or(i_shl<24>(i_load_u8(k->upper)), rest)));
    }
  }
};

struct CompactMatrix {
  const uint8_t* packed;
  const compact::Kept* kept;
  int64_t header, stride;

  CompactMatrix(const void* from, int64_t outputs, int64_t inputs)
      : packed(static_cast<const uint8_t*>(from)),
        header(compact::header_bytes(inputs)),
        stride(compact::panel_bytes(inputs)) {
    kept = reinterpret_cast<const compact::Kept*>(packed + compact::panels_of(outputs) * stride);
  }
  CompactPanel panel(int64_t number) const {
    const uint8_t* from = packed + number * stride;
    return {from + header, reinterpret_cast<const compact::Chunk*>(from + compact::kRows), kept, splat_table(from)};
  }
};

}  // namespace VOX_ISA
}  // namespace vox
