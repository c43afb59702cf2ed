// What the next plan will read first, so that a thread that waits for it can fetch that into a cache meanwhile.
// Decode steps repeat: after the layers comes the output matrix, after it, once tokens are handed out, the layers.
#pragma once
#include <atomic>
#include <cstdint>

#include "plan.h"

namespace vox {

// Written by the thread that runs plans, read by those that wait. What is read half-written fetches the wrong
// lines and changes nothing: a fetch never faults, whatever the address.
class Ahead {
 public:
  // Notes that these stages follow the plan noted before; plans that read no weights are passed over.
  void note(const Stage* stages, int64_t count) {
    const void* first = nullptr;
    for (int64_t s = 0; s < count && first == nullptr; ++s) first = stages[s].work.stream;
    if (first == nullptr) return;
    if (last_ != nullptr) last_->take(stages, count);
    last_ = &entry_for(reinterpret_cast<uintptr_t>(first));
    next_.store(last_, std::memory_order_release);
  }

  // Where a waiting thread is; one of its own for each wait.
  struct Cursor {
    int piece = 0;
    int64_t fetched = 0;
  };

  // Asks for a few lines more; false where there is nothing left to ask for.
  bool fetch(Cursor& cursor) const {
    const Entry* entry = next_.load(std::memory_order_acquire);
    if (entry == nullptr) return false;
    while (cursor.piece < entry->pieces.load(std::memory_order_relaxed)) {
      const uintptr_t from = entry->from[cursor.piece].load(std::memory_order_relaxed);
      const int64_t bytes = entry->bytes[cursor.piece].load(std::memory_order_relaxed);
      if (cursor.fetched >= bytes) {
        ++cursor.piece;
        cursor.fetched = 0;
        continue;
      }
      for (int line = 0; line < 4; ++line)
        __builtin_prefetch(reinterpret_cast<const char*>(from) + cursor.fetched + 64 * line, 0, 2);
      cursor.fetched += 4 * 64;
      return true;
    }
    return false;
  }

 private:
  static constexpr int kEntries = 4;          // models that take turns; each has two plans a step
  static constexpr int kPieces = 16;          // matrices
  static constexpr int64_t kBytes = 3 << 20;  // as much as one thread fetches while tokens are handed out

  struct Entry {
    std::atomic<uintptr_t> key{0};
    std::atomic<int> pieces{0};
    std::atomic<uintptr_t> from[kPieces] = {};
    std::atomic<int64_t> bytes[kPieces] = {};

    void take(const Stage* stages, int64_t count) {
      int n = 0;
      int64_t left = kBytes;
      for (int64_t s = 0; s < count && n < kPieces && left > 0; ++s) {
        const Work& work = stages[s].work;
        if (work.stream == nullptr) continue;
        const int64_t size = work.parts * work.stream_step < left ? work.parts * work.stream_step : left;
        from[n].store(reinterpret_cast<uintptr_t>(work.stream), std::memory_order_relaxed);
        bytes[n].store(size, std::memory_order_relaxed);
        left -= size;
        ++n;
      }
      pieces.store(n, std::memory_order_relaxed);
    }
  };

  Entry& entry_for(uintptr_t key) {
    for (Entry& entry : entries_)
      if (entry.key.load(std::memory_order_relaxed) == key) return entry;
    Entry& entry = entries_[replaced_++ % kEntries];
    entry.pieces.store(0, std::memory_order_relaxed);
    entry.key.store(key, std::memory_order_relaxed);
    return entry;
  }

  Entry entries_[kEntries];
  Entry* last_ = nullptr;
  unsigned replaced_ = 0;
  std::atomic<const Entry*> next_{nullptr};
};

}  // namespace vox
