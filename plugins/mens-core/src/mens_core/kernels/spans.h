// Chains whose rows each begin and end at a place of their own: what a mask leaves of a product.
#pragma once
#include "tile.h"

namespace vox {
namespace VOX_ISA {

// Unmasked terms [low, high) of one block, for one row.
struct Span {
  int32_t low, high;
};

// out[row] = chain over k in the row's span of a(row, k) * b(k, panel), the terms common to a
// tile's rows together. No span is empty.
template <class Left, class Side>
static void span_chains(int64_t rows, const Span* spans, const Left& a, const Side& b, int64_t panels, float* out,
                        int64_t stride) {
  const auto chain = [&](int64_t row, int64_t count, int32_t low, int32_t high, Start start) {
    tile_rows(count, panels, a.from_row(row), b, 0, low, high, out + row * stride, stride, start, Finish::store);
  };
  for (int64_t r = 0; r < rows; r += kTileRows) {
    const int64_t some = rows - r < kTileRows ? rows - r : kTileRows;
    int32_t low = spans[r].low, high = spans[r].high, lowest = low;
    for (int64_t i = r + 1; i < r + some; ++i) {
      low = spans[i].low > low ? spans[i].low : low;
      lowest = spans[i].low < lowest ? spans[i].low : lowest;
      high = spans[i].high < high ? spans[i].high : high;
    }
    if (low >= high) {
      for (int64_t i = r; i < r + some; ++i) chain(i, 1, spans[i].low, spans[i].high, Start::zero);
      continue;
    }
    if (lowest < low)
      for (int64_t i = r; i < r + some; ++i) chain(i, 1, spans[i].low, low, Start::zero);
    chain(r, some, low, high, lowest < low ? Start::memory : Start::zero);
    for (int64_t i = r; i < r + some; ++i)
      if (spans[i].high > high) chain(i, 1, high, spans[i].high, Start::memory);
  }
}

}  // namespace VOX_ISA
}  // namespace vox
