// The inner loop of every product: R rows by P panels of accumulators, k ascending.
#pragma once
#include "simd.h"
#include "tasks.h"

namespace vox {
namespace VOX_ISA {

// Asks for a cache line that is read soon, into the second cache; never faults, so it may lie past the end.
CANON void prefetch_line(const void* p) { __builtin_prefetch(p, 0, 2); }

constexpr int64_t kGroupPanels = kTilePanels > 2 ? kTilePanels : 2;  // panels of one part of a product

// Right-hand sides: value (k, panel) at base + k * k_stride + panel * panel_stride, in elements.
struct F32Side {
  static constexpr int64_t kStepsPerLine = 1;  // of k in a cache line, where k's lie side by side
  const float* base;
  int64_t k_stride, panel_stride;
  inline __attribute__((always_inline)) const float* at(int64_t k, int64_t panel) const {
    return base + k * k_stride + panel * panel_stride;
  }
  inline __attribute__((always_inline)) VF load(int64_t k, int64_t panel) const { return f_load(base + k * k_stride + panel * panel_stride); }
};
struct F16Side {
  static constexpr int64_t kStepsPerLine = 2;  // of k in a cache line, where k's lie side by side
  const uint16_t* base;
  int64_t k_stride, panel_stride;
  inline __attribute__((always_inline)) const uint16_t* at(int64_t k, int64_t panel) const {
    return base + k * k_stride + panel * panel_stride;
  }
  inline __attribute__((always_inline)) VF load(int64_t k, int64_t panel) const {
    return f_load_f16(base + k * k_stride + panel * panel_stride);
  }
};
struct Bf16Side {
  static constexpr int64_t kStepsPerLine = 2;  // of k in a cache line, where k's lie side by side
  const uint16_t* base;
  int64_t k_stride, panel_stride;
  inline __attribute__((always_inline)) const uint16_t* at(int64_t k, int64_t panel) const {
    return base + k * k_stride + panel * panel_stride;
  }
  inline __attribute__((always_inline)) VF load(int64_t k, int64_t panel) const {
    return f_load_bf16(base + k * k_stride + panel * panel_stride);
  }
};

// Left-hand sides: value (r, k), a row after the other or transposed.
struct RowsLeft {
  const float* base;
  int64_t stride;
  inline __attribute__((always_inline)) float at(int64_t r, int64_t k) const { return base[r * stride + k]; }
  RowsLeft from_row(int64_t r) const { return {base + r * stride, stride}; }
};
struct ColumnsLeft {
  const float* base;
  int64_t stride;
  inline __attribute__((always_inline)) float at(int64_t r, int64_t k) const { return base[k * stride + r]; }
  ColumnsLeft from_row(int64_t r) const { return {base + r, stride}; }
};

// acc = fma(a[r][k], b[k][panel], acc) for k in [first, last).
template <int R, int P, class Left, class Side>
CANON void tile_chain(const Left& a, const Side& b, int64_t panel, int64_t first, int64_t last, VF (&acc)[R][P]) {
  for (int64_t k = first; k < last; ++k) {
    VF right[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) right[p] = b.load(k, panel + p);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const VF left = f_splat(a.at(r, k));
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) acc[r][p] = f_fma(left, right[p], acc[r][p]);
    }
  }
}

// What to do with memory before and after a chain.
enum class Start { zero, memory };   // acc starts at +0 (a new chunk), or goes on from `out`
enum class Finish { store, fold };   // out = acc, or out = out + acc (chunk after chunk)

template <int R, int P, class Left, class Side>
static inline void tile(const Left& a, const Side& b, int64_t panel, int64_t first, int64_t last, float* out,
                        int64_t out_stride, Start start, Finish finish) {
  VF acc[R][P];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      acc[r][p] = start == Start::zero ? f_splat(0.0f) : f_load(out + r * out_stride + p * kLanes);
  tile_chain<R, P>(a, b, panel, first, last, acc);
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p) {
      float* to = out + r * out_stride + p * kLanes;
      f_store(to, finish == Finish::store ? acc[r][p] : f_add(f_load(to), acc[r][p]));
    }
}

// The same for a number of rows known only now, at most kTileRows, and any number of panels.
template <class Left, class Side>
static void tile_rows(int64_t rows, int64_t panels, const Left& a, const Side& b, int64_t panel, int64_t first,
                      int64_t last, float* out, int64_t out_stride, Start start, Finish finish) {
  int64_t p = 0;
#define VOX_TILE(R, P)                                                                                     \
  tile<R, P>(a, b, panel + p, first, last, out + p * kLanes, out_stride, start, finish)
#define VOX_TILE_ROWS(P)                  \
  switch (rows) {                         \
    case 1: VOX_TILE(1, P); break;        \
    case 2: VOX_TILE(2, P); break;        \
    case 3: VOX_TILE(3, P); break;        \
    case 4: VOX_TILE(4, P); break;        \
    case 5: VOX_TILE(5, P); break;        \
    default: VOX_TILE(6, P); break;       \
  }
  if (rows == 1) {  // alone, a row needs more panels to hide the latency
    for (; p + 4 <= panels; p += 4) VOX_TILE(1, 4);
  }
  if (kTilePanels > 1) {
    for (; p + kTilePanels <= panels; p += kTilePanels) VOX_TILE_ROWS(kTilePanels)
  }
  for (; p < panels; ++p) VOX_TILE_ROWS(1)
#undef VOX_TILE_ROWS
#undef VOX_TILE
}

}  // namespace VOX_ISA
}  // namespace vox
