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

#include "ahead.h"
#include "flush.h"
#include "plan.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace vox {
namespace {

// Waking a thread costs more than this much work; between two works of a plan nobody sleeps, and what is left
// is to hand data to another core.
constexpr int64_t kInlineNanoseconds = 6000;
constexpr int64_t kInlineInPlanNanoseconds = 2000;
// Shared work is cut into so many tickets per thread, unless they were too short to be worth taking or
// so long that a thread waits for another's last one.
constexpr int64_t kTicketsPerThread = 6;
constexpr int64_t kLeastTicketNanoseconds = 1500;
constexpr int64_t kMostTicketNanoseconds = 40000;
// Work that streams no weights loses nothing where a ticket begins, and waits less for the last one.
constexpr int64_t kMostTicketNanosecondsInCache = 20000;
// Between two steps of a decode lie some hundred microseconds in which tokens are handed out. A thread that
// slept through them comes late to the next step, by up to a millisecond on a busy machine.
constexpr int64_t kDefaultSpinMicroseconds = 500;
// How often a thread that waits for another's ticket looks before it sleeps. It never yields instead: that hands the
// core to whatever else runs, of lower priority too (docs/log.md).
constexpr int kSpinsBeforeSleep = 4000;
// What a thread fetches of its next ticket's memory while it waits; a part of a core's second cache.
constexpr int64_t kFetchedEarlyBytes = 128 << 10;

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

  void run(Stage* stages, int64_t stage_count) {
    cut_into_tickets(stages, stage_count);
    if (!threads_.empty()) ahead_.note(stages, stage_count);
    stages_ = stages;
    stage_count_ = stage_count;
    next_.store(0, std::memory_order_relaxed);
    done_.store(0, std::memory_order_relaxed);
    if (threads_.empty() || tickets_ < 2) {
      work_on_plan(own_);
      return;
    }
    const uint64_t generation = (state_.load(std::memory_order_relaxed) >> 32) + 1;
    state_.store((generation << 32) | kOpen, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    work_on_plan(own_);
    // Whoever has not joined by now never will; the others are finishing their last ticket.
    state_.fetch_and(~kOpen, std::memory_order_seq_cst);
    wait_until([this] { return (state_.load(std::memory_order_seq_cst) & kActive) == 0; }, [] { return false; });
  }

 private:
  static constexpr uint64_t kOpen = uint64_t{1} << 31;
  static constexpr uint64_t kActive = kOpen - 1;

  static bool is_small(const Work& work, int64_t stages) {
    const int64_t inline_below = stages > 1 ? kInlineInPlanNanoseconds : kInlineNanoseconds;
    return work.parts < 2 || work.parts * work.nanoseconds_per_part < inline_below;
  }

  void cut_into_tickets(Stage* stages, int64_t count) {
    int64_t tickets = 0, needs_of_group = 0;
    bool was_small = false;         // the last stage lies in the last ticket, alone or with others as small
    bool is_group_in_one = false;  // the last ticket is all that the present group has so far
    for (int64_t s = 0; s < count; ++s) {
      Stage& stage = stages[s];
      const bool starts_group = s == 0 || !stage.joins;
      const bool small = threads_.empty() || is_small(stage.work, count);
      // Small works in a row are one ticket: to hand their data to another core would take longer.
      const bool extends = small && was_small && (!starts_group || is_group_in_one);
      if (starts_group) needs_of_group = tickets;
      stage.grain = small ? stage.work.parts : grain_of(stage.work);
      if (extends) {
        stage.first_ticket = tickets - 1;
        stage.needs = stages[s - 1].needs;
      } else {
        is_group_in_one = starts_group && small;
        stage.first_ticket = tickets;
        stage.needs = needs_of_group;
        tickets += small ? 1 : (stage.work.parts + stage.grain - 1) / stage.grain;
      }
      stage.end_ticket = tickets;
      stage.fault = 0;
      was_small = small;
    }
    tickets_ = tickets;
  }

  int64_t grain_of(const Work& work) const {
    const int64_t share = work.parts * work.nanoseconds_per_part / (count() * kTicketsPerThread);
    const int64_t longest = work.stream == nullptr ? kMostTicketNanosecondsInCache : kMostTicketNanoseconds;
    const int64_t wanted = share < kLeastTicketNanoseconds ? kLeastTicketNanoseconds : share > longest ? longest : share;
    const int64_t most = (work.parts + count() - 1) / count();
    const int64_t grain = (wanted + work.nanoseconds_per_part - 1) / work.nanoseconds_per_part;
    return grain < most ? grain : most;
  }

  void work_on_plan(Scratch& memory) {
    FlushScope flush;
    int64_t s = 0;
    for (;;) {
      const int64_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
      if (ticket >= tickets_) return;
      while (ticket >= stages_[s].end_ticket) ++s;
      const int64_t needs = stages_[s].needs;
      if (done_.load(std::memory_order_acquire) < needs) {
        int64_t fetched = 0;
        wait_until([&] { return done_.load(std::memory_order_seq_cst) >= needs; },
                   [&] { return fetch_early(stages_[s], ticket, &fetched); });
      }
      // Stages that share this ticket follow one another.
      for (int64_t i = s; i < stage_count_ && stages_[i].first_ticket <= ticket; ++i)
        run_ticket(stages_[i], ticket, memory);
      done_.fetch_add(1, std::memory_order_seq_cst);
      if (waiters_.load(std::memory_order_seq_cst) > 0) {
        { std::lock_guard<std::mutex> lock(mutex_); }
        progress_.notify_all();
      }
    }
  }

  void run_ticket(Stage& stage, int64_t ticket, Scratch& memory) {
    const Work& work = stage.work;
    const int64_t begin = (ticket - stage.first_ticket) * stage.grain;
    const int64_t end = begin + stage.grain < work.parts ? begin + stage.grain : work.parts;
    if (begin >= end) return;
    void* scratch = memory.get(work.scratch_bytes);
    const int64_t fault =
        work.scratch_bytes > 0 && scratch == nullptr ? kOutOfMemory : work.part(work.task, begin, end, scratch);
    if (fault == 0) return;
    std::lock_guard<std::mutex> lock(fault_mutex_);
    stage.fault = first_of(stage.fault, fault);
  }

  // Asks for a few more lines of what the ticket will read; false when there is no more to ask for.
  static bool fetch_early(const Stage& stage, int64_t ticket, int64_t* fetched) {
    const Work& work = stage.work;
    if (work.stream == nullptr) return false;
    int64_t bytes = stage.grain * work.stream_step;
    if (bytes > kFetchedEarlyBytes) bytes = kFetchedEarlyBytes;
    if (*fetched >= bytes) return false;
    const char* from =
        static_cast<const char*>(work.stream) + (ticket - stage.first_ticket) * stage.grain * work.stream_step;
    for (int line = 0; line < 4; ++line) __builtin_prefetch(from + *fetched + 64 * line, 0, 3);
    *fetched += 4 * 64;
    return true;
  }

  // Spins, then sleeps, until `ready`; `meanwhile` is called while it spins, and returns whether it did something.
  template <class Ready, class Meanwhile>
  void wait_until(const Ready& ready, const Meanwhile& meanwhile) {
    for (int spins = 0; spins < kSpinsBeforeSleep; ++spins) {
      if (ready()) return;
      if (!meanwhile()) pause_cpu();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    waiters_.fetch_add(1, std::memory_order_seq_cst);
    progress_.wait(lock, ready);
    waiters_.fetch_sub(1, std::memory_order_seq_cst);
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
          work_on_plan(memory);
          state_.fetch_sub(1, std::memory_order_seq_cst);
          if (waiters_.load(std::memory_order_seq_cst) > 0) {
            { std::lock_guard<std::mutex> lock(mutex_); }
            progress_.notify_all();
          }
          break;
        }
      }
    }
  }

  uint64_t wait_for_more_than(uint64_t served) {
    using clock = std::chrono::steady_clock;
    const auto until = clock::now() + std::chrono::microseconds(spin_.load(std::memory_order_relaxed));
    Ahead::Cursor cursor;
    do {
      for (int i = 0; i < 32; ++i) {
        const uint64_t state = state_.load(std::memory_order_acquire);
        if ((state >> 32) != served || stopping_.load(std::memory_order_relaxed)) return state;
        if (!ahead_.fetch(cursor)) pause_cpu();
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
  Stage* stages_ = nullptr;
  int64_t stage_count_ = 0;
  int64_t tickets_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  alignas(64) std::atomic<int> waiters_{0};
  std::atomic<int> sleepers_{0};
  std::atomic<bool> stopping_{false};
  std::mutex mutex_, fault_mutex_;
  std::condition_variable wake_, progress_;
  Scratch own_;
  Ahead ahead_;
  std::vector<std::thread> threads_;
};

std::atomic<int64_t> Pool::spin_{kDefaultSpinMicroseconds};

// One plan at a time: two Python threads in here would only share the same cores.
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

int64_t run_stages(Stage* stages, int64_t count) {
  std::lock_guard<std::mutex> lock(*g_turn);
  try {
    if (g_pool == nullptr) start_pool();
  } catch (const std::system_error&) {
    return kOutOfMemory;
  }
  g_pool->run(stages, count);
  return 0;
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
