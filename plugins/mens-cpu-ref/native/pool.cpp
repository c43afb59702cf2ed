#include "pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <vector>

#include "flush.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vox {
namespace {

// Waking a thread costs more than this much work.
constexpr int64_t kInlineNanoseconds = 6000;
// A decode step has a gap of some microseconds between two operators; spinning over it keeps
// the wake-up time below one.
constexpr int64_t kDefaultSpinMicroseconds = 100;

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#else
  __asm__ volatile("yield");
#endif
}

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { free(memory_); }
  // Returns null when the memory is not to be had; what was there before is lost.
  void* get(int64_t bytes) {
    if (bytes > size_) {
      free(memory_);
      size_ = 0;
      memory_ = nullptr;
      if (posix_memalign(&memory_, 64, static_cast<size_t>(bytes)) != 0) memory_ = nullptr;
      if (memory_ != nullptr) size_ = bytes;
    }
    return memory_;
  }

 private:
  void* memory_ = nullptr;
  int64_t size_ = 0;
};

int64_t first_of(int64_t a, int64_t b) {
  if (a == 0) return b;
  if (b == 0) return a;
  return a < b ? a : b;  // kOutOfMemory, being negative, wins
}

class Pool {
 public:
  explicit Pool(int count) {
    // Python handles signals on its own thread.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
      for (int i = 1; i < count; ++i) threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
      pthread_sigmask(SIG_SETMASK, &before, nullptr);
      stop();
      throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  ~Pool() { stop(); }

  int count() const { return static_cast<int>(threads_.size()) + 1; }

  int64_t run(const Work& work) {
    const int64_t total = work.parts * work.nanoseconds_per_part;
    if (threads_.empty() || work.parts < 2 || total < kInlineNanoseconds) return run_here(work);

    work_ = work;
    // Several grabs per thread even out a thread that the system takes away for a while.
    const int64_t even = (work.parts + count() * 6 - 1) / (count() * 6);
    const int64_t cheap = 1000 / (work.nanoseconds_per_part + 1);
    grain_ = even > cheap ? even : cheap;
    const int64_t share = (work.parts + count() - 1) / count();
    if (grain_ > share) grain_ = share;
    if (grain_ < 1) grain_ = 1;
    next_.store(0, std::memory_order_relaxed);
    fault_.store(0, std::memory_order_relaxed);
    const uint64_t generation = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store((generation << 32) | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    work_on(own_);
    // Whoever has not joined by now never will; the others are finishing their last part.
    state_.fetch_and(~kOpen, std::memory_order_acq_rel);
    for (int spins = 0; (state_.load(std::memory_order_acquire) & kActive) != 0; ++spins) {
      pause_cpu();
      if (spins > 2000) std::this_thread::yield();
    }
    return fault_.load(std::memory_order_relaxed);
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  static constexpr uint64_t kActive = kOpen - 1;

  int64_t run_here(const Work& work) {
    void* scratch = own_.get(work.scratch_bytes);
    if (work.scratch_bytes > 0 && scratch == nullptr) return kOutOfMemory;
    FlushScope flush;
    return work.part(work.task, 0, work.parts, scratch);
  }

  void work_on(Scratch& memory) {
    void* scratch = memory.get(work_.scratch_bytes);
    int64_t fault = work_.scratch_bytes > 0 && scratch == nullptr ? kOutOfMemory : 0;
    if (fault == 0) {
      FlushScope flush;
      for (;;) {
        const int64_t begin = next_.fetch_add(grain_, std::memory_order_relaxed);
        if (begin >= work_.parts) break;
        const int64_t end = begin + grain_ < work_.parts ? begin + grain_ : work_.parts;
        fault = first_of(fault, work_.part(work_.task, begin, end, scratch));
      }
    }
    int64_t seen = fault_.load(std::memory_order_relaxed);
    while (fault != 0 && first_of(seen, fault) != seen &&
           !fault_.compare_exchange_weak(seen, fault, std::memory_order_relaxed)) {
    }
  }

  void serve() {
    Scratch memory;
    uint64_t served = 0;
    for (;;) {
      uint64_t state = wait_for_more_than(served);
      if (stopping_.load(std::memory_order_acquire)) return;
      served = state >> 32;
      while ((state & kOpen) != 0 && (state >> 32) == served) {
        if (state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) {
          work_on(memory);
          state_.fetch_sub(1, std::memory_order_acq_rel);
          break;
        }
      }
    }
  }

  uint64_t wait_for_more_than(uint64_t served) {
    using clock = std::chrono::steady_clock;
    const auto until = clock::now() + std::chrono::microseconds(spin_.load(std::memory_order_relaxed));
    do {
      for (int i = 0; i < 32; ++i) {
        const uint64_t state = state_.load(std::memory_order_acquire);
        if ((state >> 32) != served || stopping_.load(std::memory_order_relaxed)) return state;
        pause_cpu();
      }
    } while (clock::now() < until);
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] {
      return (state_.load(std::memory_order_seq_cst) >> 32) != served || stopping_.load(std::memory_order_acquire);
    });
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
    return state_.load(std::memory_order_acquire);
  }

  void stop() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true, std::memory_order_release);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
    threads_.clear();
  }

 public:
  static std::atomic<int64_t> spin_;

 private:
  Work work_{};
  int64_t grain_ = 1;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> fault_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  Scratch own_;
  std::vector<std::thread> threads_;
};

std::atomic<int64_t> Pool::spin_{kDefaultSpinMicroseconds};

// One operator at a time: two Python threads in here would only share the same cores.
std::mutex* g_turn = new std::mutex;
Pool* g_pool = nullptr;
int g_threads = 1;

// A forked child has none of the threads; it starts over with its own.
void forget_threads() {
  g_turn = new std::mutex;
  g_pool = nullptr;
}

void start_pool() {
  static std::once_flag registered;
  std::call_once(registered, [] { pthread_atfork(nullptr, nullptr, forget_threads); });
  g_pool = new Pool(g_threads);
}

}  // namespace

int64_t run(const Work& work) {
  if (work.parts <= 0) return 0;
  std::lock_guard<std::mutex> lock(*g_turn);
  try {
    if (g_pool == nullptr) start_pool();
  } catch (const std::system_error&) {
    return kOutOfMemory;
  }
  return g_pool->run(work);
}

int set_threads(int count) {
  std::lock_guard<std::mutex> lock(*g_turn);
  if (count < 1) return -1;
  if (g_pool != nullptr && g_pool->count() == count) return 0;
  delete g_pool;
  g_pool = nullptr;
  g_threads = count;
  try {
    start_pool();
  } catch (const std::system_error&) {
    g_threads = 1;
    return -1;
  }
  return 0;
}

int threads() { return g_threads; }

void set_spin_microseconds(int64_t microseconds) { Pool::spin_.store(microseconds); }

}  // namespace vox
