// How fast this machine's threads read memory: the limit that a decode step is held against.
#include "abi.h"

#include <atomic>

#include "pool.h"

namespace {

constexpr int64_t kPieceBytes = 1 << 20;
constexpr int64_t kAhead = 4096;

struct ReadTask {
  const uint64_t* words;
  std::atomic<uint64_t>* folded;
};

int64_t read_part(const void* opaque, int64_t begin, int64_t end, void*) {
  const auto& task = *static_cast<const ReadTask*>(opaque);
  constexpr int64_t kWords = kPieceBytes / 8;
  uint64_t folded[8] = {};
  for (const uint64_t* at = task.words + begin * kWords; at != task.words + end * kWords; at += 8) {
    __builtin_prefetch(reinterpret_cast<const char*>(at) + kAhead, 0, 3);
    for (int i = 0; i < 8; ++i) folded[i] ^= at[i];
  }
  for (int i = 1; i < 8; ++i) folded[0] ^= folded[i];
  task.folded->fetch_xor(folded[0], std::memory_order_relaxed);
  return 0;
}

}  // namespace

extern "C" int64_t vox_read(const void* memory, int64_t bytes, uint64_t* folded) {
  std::atomic<uint64_t> all{0};
  const ReadTask task{static_cast<const uint64_t*>(memory), &all};
  // A piece takes some 30 microseconds.
  const int64_t code = vox::run({read_part, &task, bytes / kPieceBytes, 30000});
  *folded = all.load();
  return code;
}
