// What a backward kernel is told: plain data, the same on every lane. `rope_backward` takes a RopeTask.
#pragma once
#include "tasks.h"

namespace vox {

struct NormBackwardTask {  // parts are groups of kNormRows rows
  const float* dy;
  const float* x;
  const float* weight;
  float* dx;
  int64_t rows;
  int64_t width;
  int64_t rows_per_fault;
  float eps;
};

struct GateBackwardTask {  // parts as elementwise
  const float* dy;
  const float* gate;
  const float* up;
  float* dgate;
  float* dup;
  int64_t elements;
  int64_t width;
};

// One sequence and one KV head, with the memory that attention's backward works in. Its rows are its
// positions from 0 on.
struct BackwardStream {
  int32_t sequence, kv_head;
  int32_t first_row, length;
  float* key_rows;       // [block][128][value_stride]: the cache's keys, row by row
  float* value_columns;  // [block][head_dim][128]: its values, transposed
  float* q;              // [128][value_stride]: queries of the round, padded
  float* dy;             // the same of dy
  float* tiles;          // [block that the round sees][2][128][128]: P, then dS, rows being queries
};

// Some consecutive queries of the round's query block, or some keys of one KV block; to
// `transpose`, all of its keys.
struct BackwardItem {
  int32_t stream;
  int32_t block;
  int32_t first, end;  // within the block of 128
};
constexpr int64_t kBackwardRows = 64;  // of an item, at most

// A round is one query head of every group and one block of 128 queries.
struct AttentionBackwardTask {  // parts are items
  KvLayer layer;
  Rows rows;
  const BackwardStream* streams;
  const BackwardItem* items;
  const float* dy;
  const float* q;
  const float* out;
  const float* m;
  const float* l;
  float* dq;
  float* dk;
  float* dv;
  int64_t heads;
  float scale;
  int64_t window;  // 0: everything before
  float softcap;   // 0: none
  int64_t head_of_group;
  int64_t query_block;
};

// The first block of 128 that a query at `position` sees.
inline int64_t first_block_seen(int64_t position, int64_t window) {
  const int64_t low = window > 0 ? position - window + 1 : 0;
  return low > 0 ? low / kBlock : 0;
}

}  // namespace vox
