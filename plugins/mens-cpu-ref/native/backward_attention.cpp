#include "backward_attention.h"

#include <stdlib.h>

#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace vox {
namespace {

// What the streams of one pass may take together; a longer one runs alone.
constexpr int64_t kPassFloats = (int64_t{64} << 20) / sizeof(float);

int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

struct Freed {
  void operator()(float* memory) const { free(memory); }
};
using Floats = std::unique_ptr<float, Freed>;

Floats aligned_floats(int64_t count) {
  void* memory = nullptr;
  if (posix_memalign(&memory, 64, static_cast<size_t>(count) * sizeof(float)) != 0) throw std::bad_alloc();
  return Floats(static_cast<float*>(memory));
}

int64_t blocks_of(const BackwardStream& stream) { return parts_of(stream.length, kBlock); }

// Those of the 128 from `first` on that the stream has.
int64_t positions_of(const BackwardStream& stream, int64_t first) {
  const int64_t left = stream.length - first;
  return left < kBlock ? (left > 0 ? left : 0) : kBlock;
}

// Blocks that some query block sees, at most.
int64_t tiles_of(const BackwardStream& stream, int64_t window) {
  const int64_t blocks = blocks_of(stream);
  const int64_t seen = window > 0 ? parts_of(window - 1, kBlock) + 1 : blocks;
  return seen < blocks ? seen : blocks;
}

int64_t floats_of(const BackwardStream& stream, const AttentionBackwardTask& task) {
  const KvLayer& layer = task.layer;
  return blocks_of(stream) * kBlock * (layer.value_stride + layer.head_dim) + 2 * kBlock * layer.value_stride +
         tiles_of(stream, task.window) * 2 * kBlock * kBlock;
}

void place(BackwardStream& stream, const AttentionBackwardTask& task, float* memory) {
  const KvLayer& layer = task.layer;
  const auto take = [&memory](int64_t count) {
    float* taken = memory;
    memory += count;
    return taken;
  };
  stream.key_rows = take(blocks_of(stream) * kBlock * layer.value_stride);
  stream.value_columns = take(blocks_of(stream) * kBlock * layer.head_dim);
  stream.q = take(kBlock * layer.value_stride);
  stream.dy = take(kBlock * layer.value_stride);
  stream.tiles = take(tiles_of(stream, task.window) * 2 * kBlock * kBlock);
}

void cut(std::vector<BackwardItem>& items, int32_t stream, int64_t block, int64_t count, int64_t rows_per_item) {
  for (int64_t first = 0; first < count; first += rows_per_item) {
    const int64_t end = first + rows_per_item < count ? first + rows_per_item : count;
    items.push_back({stream, static_cast<int32_t>(block), static_cast<int32_t>(first), static_cast<int32_t>(end)});
  }
}

// So few rows that every thread has some items.
int64_t rows_per_item(int64_t rows) {
  int64_t each = kBackwardRows;
  while (each > 24 && rows < 2 * threads() * each) each /= 2;
  return each;
}

class Pass {
 public:
  Pass(const BackwardKernels& kernels, const AttentionBackwardTask& task, std::vector<BackwardStream> streams)
      : kernels_(kernels), task_(task), streams_(std::move(streams)) {
    int64_t floats = 0;
    for (const BackwardStream& stream : streams_) floats += floats_of(stream, task_);
    memory_ = aligned_floats(floats);
    float* at = memory_.get();
    for (BackwardStream& stream : streams_) {
      place(stream, task_, at);
      at += floats_of(stream, task_);
      longest_ = stream.length > longest_ ? stream.length : longest_;
    }
    task_.streams = streams_.data();
  }

  int64_t run_all() {
    for (int32_t s = 0; s < count(); ++s)
      for (int64_t b = 0; b < blocks_of(streams_[s]); ++b)
        cut(items_, s, b, positions_of(streams_[s], b * kBlock), kBlock);
    int64_t code = run_items(kernels_.transpose, task_.layer.head_dim * kBlock, 0);
    const int64_t group = task_.heads / task_.layer.kv_heads;
    for (int64_t h = 0; h < group && code >= 0; ++h)
      for (int64_t b = 0; b * kBlock < longest_ && code >= 0; ++b) {
        task_.head_of_group = h;
        task_.query_block = b;
        code = first_of(code, round());
      }
    return code;
  }

  static int64_t first_of(int64_t code, int64_t other) {
    if (code < 0 || other < 0) return code < 0 ? code : other;
    return code == 0 || (other != 0 && other < code) ? other : code;
  }

 private:
  int32_t count() const { return static_cast<int32_t>(streams_.size()); }

  int64_t run_items(Part part, int64_t nanoseconds, int64_t scratch_bytes) {
    task_.items = items_.data();
    return run({part, &task_, static_cast<int64_t>(items_.size()), nanoseconds, scratch_bytes});
  }

  int64_t round() {
    const int64_t first_query = task_.query_block * kBlock;
    const int64_t first_key_block = first_block_seen(first_query, task_.window);
    const int64_t seen = task_.query_block + 1 - first_key_block;
    int64_t queries = 0;
    for (const BackwardStream& stream : streams_) queries += positions_of(stream, first_query);
    const int64_t scratch = kernels_.attention_scratch_bytes(task_.layer);
    const int64_t C = task_.layer.head_dim;

    // Three products per query, key and channel, then two, at a modest 16 multiply-adds a nanosecond.
    int64_t each = rows_per_item(queries);
    items_.clear();
    for (int32_t s = 0; s < count(); ++s) cut(items_, s, task_.query_block, positions_of(streams_[s], first_query), each);
    const int64_t code = run_items(kernels_.queries, each * seen * kBlock * C * 3 / 16, scratch);
    if (code < 0) return code;

    each = rows_per_item(queries * seen);
    items_.clear();
    for (int32_t s = 0; s < count(); ++s) {
      if (positions_of(streams_[s], first_query) == 0) continue;
      for (int64_t b = first_key_block; b <= task_.query_block; ++b)
        cut(items_, s, b, positions_of(streams_[s], b * kBlock), each);
    }
    return first_of(code, run_items(kernels_.keys, each * kBlock * C * 2 / 16, scratch));
  }

  const BackwardKernels& kernels_;
  AttentionBackwardTask task_;
  std::vector<BackwardStream> streams_;
  std::vector<BackwardItem> items_;
  Floats memory_;
  int64_t longest_ = 0;
};

}  // namespace

bool is_whole(const Rows& rows, int64_t count, int64_t blocks) {
  if (rows.starts[0] != 0 || rows.starts[rows.sequences] != count) return false;
  for (int64_t s = 0; s < rows.sequences; ++s) {
    if (rows.starts[s] > rows.starts[s + 1]) return false;
    for (int64_t r = rows.starts[s]; r < rows.starts[s + 1]; ++r) {
      const int64_t position = rows.positions[r];
      if (position != r - rows.starts[s] || position / kBlock >= rows.blocks_per_sequence) return false;
      const int32_t block = rows.block_tables[s * rows.blocks_per_sequence + position / kBlock];
      if (block < 0 || block >= blocks) return false;
    }
  }
  return true;
}

int64_t run_attention_backward(const BackwardKernels& kernels, AttentionBackwardTask task, int64_t rows) {
  std::vector<BackwardStream> streams;
  int64_t code = 0, floats = 0;
  const auto run_pass = [&] {
    if (streams.empty()) return;
    code = Pass::first_of(code, Pass(kernels, task, std::move(streams)).run_all());
    streams.clear();
    floats = 0;
  };
  for (int64_t s = 0; s < task.rows.sequences; ++s)
    for (int64_t g = 0; g < task.layer.kv_heads && task.rows.starts[s] < task.rows.starts[s + 1]; ++g) {
      BackwardStream stream{};
      stream.sequence = static_cast<int32_t>(s);
      stream.kv_head = static_cast<int32_t>(g);
      stream.first_row = task.rows.starts[s];
      stream.length = task.rows.starts[s + 1] - task.rows.starts[s];
      if (floats + floats_of(stream, task) > kPassFloats) run_pass();
      if (code < 0) return code;
      floats += floats_of(stream, task);
      streams.push_back(stream);
    }
  run_pass();
  if (code < 0) return code;
  return Pass::first_of(code, run({kernels.finish_keys, &task, rows, task.layer.kv_heads * task.layer.head_dim / 4}));
}

}  // namespace vox
