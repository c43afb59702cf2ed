#include "runner.h"

#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <vector>

#include "flush.h"

namespace vox_shim {
namespace {

// --- threads of a group ----------------------------------------------------------------------

constexpr size_t kStackBytes = 64 << 10;
enum class State { ready, at_barrier, at_exchange, ended };
struct Fiber {
  jmp_buf here;
  State state;
  char* stack;
  bool made;
};
Fiber g_fibers[kMostOfGroup];
jmp_buf g_scheduler;
int g_current;

int g_simd_width = 32;
int g_stretch;  // between barriers, of the group that runs
uint32_t g_exchanged[kMostOfGroup];

const Kernel* g_kernel;
void* const* g_buffers;
Place g_place;

// A fiber serves one thread after another: this never returns.
void serve() {
  for (;;) {
    Fiber& me = g_fibers[g_current];
    const Place place = g_place;
    g_kernel->call(g_buffers, place);
    me.state = State::ended;
    if (_setjmp(me.here) == 0) _longjmp(g_scheduler, 1);
  }
}

void resume(int thread) {
  Fiber& fiber = g_fibers[thread];
  g_current = thread;
  g_place.local = static_cast<uint32_t>(thread);
  if (_setjmp(g_scheduler) != 0) return;
  if (fiber.made) _longjmp(fiber.here, 1);
  if (fiber.stack == nullptr) fiber.stack = static_cast<char*>(malloc(kStackBytes));
  fiber.made = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = fiber.stack;
  context.uc_stack.ss_size = kStackBytes;
  context.uc_link = nullptr;
  makecontext(&context, serve, 0);
  setcontext(&context);
}

// --- shared memory ------------------------------------------------------------------------------

constexpr int kPoison = 0x7F;  // as a float or an integer: huge, so that no maximum or sum hides it
struct Piece {
  void* memory;
  size_t bytes;
  Seen* seen;
  int count;
};
std::vector<Piece>& pieces() {
  static std::vector<Piece> all;
  return all;
}

// --- buffers -----------------------------------------------------------------------------------------

// A buffer lies against a page that no one may touch, at its end or at its start, amid a wide stretch of
// such pages: what a kernel reads or writes outside it stops the kernel.
constexpr size_t kGuard = size_t{256} << 20;
constexpr size_t kPage = 4096;
struct Guarded {
  char* region;
  size_t region_bytes;
  char* data;
  size_t bytes;
  char* source;  // where its content comes from and goes
  std::vector<char> fetched;  // by page, of a large one: only what a kernel touches is copied
};
constexpr size_t kLarge = size_t{64} << 10;
std::vector<Guarded>* g_memory;

Guarded guarded(char* source, size_t bytes, bool at_end) {
  const size_t pages = (bytes + kPage - 1) / kPage * kPage;
  Guarded g{nullptr, pages + 2 * kGuard, nullptr, bytes, source, {}};
  void* region = mmap(nullptr, g.region_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (region == MAP_FAILED) return g;
  g.region = static_cast<char*>(region);
  char* data = g.region + kGuard + (at_end ? pages - bytes : 0);
  if (bytes > kLarge) {
    g.fetched.assign(pages / kPage, 0);
  } else if (pages > 0) {
    if (mprotect(g.region + kGuard, pages, PROT_READ | PROT_WRITE) != 0) return g;
    memcpy(data, source, bytes);
  }
  g.data = data;
  return g;
}

// The bytes of a buffer that lie in one of its pages, there and in its source.
struct Stretch {
  char* here;
  char* there;
  size_t bytes;
};
Stretch stretch_of(const Guarded& g, size_t page) {
  char* first = g.region + kGuard + page * kPage;
  char* end = first + kPage;
  if (first < g.data) first = g.data;
  if (end > g.data + g.bytes) end = g.data + g.bytes;
  return {first, g.source + (first - g.data), static_cast<size_t>(end - first)};
}

// Fetches the page of a large buffer that holds the address; false: there is none.
bool fetch(const char* address) {
  for (Guarded& g : *g_memory) {
    if (g.fetched.empty() || address < g.data || address >= g.data + g.bytes) continue;
    const size_t page = static_cast<size_t>(address - (g.region + kGuard)) / kPage;
    if (g.fetched[page] != 0) return false;
    if (mprotect(g.region + kGuard + page * kPage, kPage, PROT_READ | PROT_WRITE) != 0) return false;
    const Stretch s = stretch_of(g, page);
    memcpy(s.here, s.there, s.bytes);
    g.fetched[page] = 1;
    return true;
  }
  return false;
}

void give_back(Guarded& g) {
  if (g.fetched.empty()) {
    memcpy(g.source, g.data, g.bytes);
    return;
  }
  for (size_t page = 0; page < g.fetched.size(); ++page) {
    if (g.fetched[page] == 0) continue;
    const Stretch s = stretch_of(g, page);
    memcpy(s.there, s.here, s.bytes);
  }
}

sigjmp_buf g_stop;
char* g_fault_address;
const char* g_complaint;
void on_fault(int, siginfo_t* info, void*) {
  if (fetch(static_cast<char*>(info->si_addr))) return;
  g_fault_address = static_cast<char*>(info->si_addr);
  siglongjmp(g_stop, 1);
}
[[noreturn]] void complain(const char* what) {
  g_complaint = what;
  siglongjmp(g_stop, 2);
}

int count_of(State state, int first, int last) {
  int count = 0;
  for (int i = first; i < last; ++i) count += g_fibers[i].state == state;
  return count;
}

// Lets the SIMD groups go on that have met at an exchange; says whether there was one.
bool release_exchanges() {
  bool any = false;
  const int group = group_of(*g_kernel);
  for (int first = 0; first < group; first += g_simd_width) {
    const int last = first + g_simd_width < group ? first + g_simd_width : group;
    const int met = count_of(State::at_exchange, first, last);
    if (met == 0) continue;
    if (met != last - first) {
      g_place.local = static_cast<uint32_t>(first);
      complain("threads of a SIMD group do not meet at a shuffle");
    }
    for (int i = first; i < last; ++i) g_fibers[i].state = State::ready;
    any = true;
  }
  return any;
}

void run_group(int order) {
  for (const Piece& piece : pieces()) {
    memset(piece.memory, kPoison, piece.bytes);
    if (piece.count > 0) memset(piece.seen, 0, sizeof(Seen) * piece.count);
  }
  const int group = group_of(*g_kernel);
  g_stretch = 1;
  for (Fiber& fiber : g_fibers) fiber.state = State::ready;
  for (;;) {
    for (int i = 0; i < group; ++i) {
      const int thread = order == 0 ? i : group - 1 - i;
      if (g_fibers[thread].state == State::ready) resume(thread);
    }
    if (release_exchanges()) continue;
    const int ended = count_of(State::ended, 0, group);
    if (ended == group) return;
    if (ended != 0) complain("a thread ended before a barrier of its group");
    for (Fiber& fiber : g_fibers) fiber.state = State::ready;
    ++g_stretch;
  }
}

// What of a kernel's subnormals is zero. One alone is a mistake that only some machines can make.
enum FlushMode { kNothing, kBoth, kOperands, kResults };
bool has_mode(int flush) {
#if defined(__x86_64__)
  return flush >= kNothing && flush <= kResults;
#else
  return flush == kNothing || flush == kBoth;
#endif
}
class Environment {
 public:
  explicit Environment(int flush) {
#if defined(__x86_64__)
    if (flush == kOperands) _mm_setcsr(_mm_getcsr() & ~0x8000u);
    if (flush == kResults) _mm_setcsr(_mm_getcsr() & ~0x0040u);
#endif
  }

 private:
  vox::FlushScope both_;
};

}  // namespace

const Place& current() { return g_place; }

static void wait_in(State state) {
  Fiber& me = g_fibers[g_current];
  me.state = state;
  if (_setjmp(me.here) == 0) _longjmp(g_scheduler, 1);
}
void barrier() { wait_in(State::at_barrier); }

static int g_without = -1;
static bool g_met[64];
bool is_kept(int number) {
  g_met[number] = true;
  return number != g_without;
}

uint32_t simd_width() { return static_cast<uint32_t>(g_simd_width); }
uint32_t simd_lane() { return static_cast<uint32_t>(g_current % g_simd_width); }
uint32_t simd_exchange(uint32_t mine, uint32_t from) {
  const int first = g_current / g_simd_width * g_simd_width;
  if (from >= simd_width()) complain("a shuffle asked for a thread beyond its SIMD group");
  g_exchanged[g_current] = mine;
  wait_in(State::at_exchange);
  const uint32_t found = g_exchanged[first + from];
  // Nobody's next value comes before all have this one.
  wait_in(State::at_exchange);
  return found;
}

void note_write(Seen& seen) {
  if (seen.written_in == g_stretch && seen.writer != g_current)
    complain("shared memory was written by two threads with no barrier between");
  if (seen.read_in == g_stretch && seen.reader != g_current)
    complain("shared memory was written after another thread's read with no barrier between");
  seen.written_in = g_stretch;
  seen.writer = g_current;
}
void note_read(Seen& seen) {
  if (seen.written_in == 0) complain("shared memory was read before it was written");
  if (seen.written_in == g_stretch && seen.writer != g_current)
    complain("shared memory was read after another thread's write with no barrier between");
  if (seen.read_in == g_stretch && seen.reader != g_current)
    seen.reader = kSeveral;
  else
    seen.reader = g_current;
  seen.read_in = g_stretch;
}

void register_shared(void* memory, size_t bytes, Seen* seen, int count) {
  memset(memory, kPoison, bytes);
  pieces().push_back({memory, bytes, seen, count});
}
void shared_out_of_bounds() { complain("shared memory was used outside its bounds"); }

}  // namespace vox_shim

// From now on the barrier of this number is no barrier; -1: all are.
extern "C" void shim_without(int number) { vox_shim::g_without = number; }
// Whether a thread came to it since this was asked last.
extern "C" int shim_met(int number) {
  const bool met = vox_shim::g_met[number];
  vox_shim::g_met[number] = false;
  return met;
}

// Runs a kernel over a grid. `buffers` are copied into guarded memory and back, large ones as far as they are
// touched; `at_end` says which side is
// guarded to the byte; `order` 0 or 1 is the order in which a group's threads run between barriers;
// `flush` is the floating-point environment (FlushMode), `simd` the threads of a SIMD
// group. Returns 0, or 1 with what went wrong in `message`.
extern "C" int shim_run(const char* name, void** buffers, const int64_t* bytes, int count, int64_t threads_x,
                        int64_t threads_y, int at_end, int order, int flush, int simd, char* message,
                        int message_bytes) {
  using namespace vox_shim;
  if (!has_mode(flush)) {
    snprintf(message, message_bytes, "%s: this machine can't flush one of operands and results alone", name);
    return 1;
  }
  g_simd_width = simd;
  g_kernel = nullptr;
  for (int i = 0; i < kKernelCount; ++i)
    if (strcmp(kKernels[i].name, name) == 0) g_kernel = &kKernels[i];
  if (g_kernel == nullptr || g_kernel->buffers != count) {
    snprintf(message, message_bytes, "%s: no such kernel with %d buffers", name, count);
    return 1;
  }
  std::vector<Guarded> memory;
  std::vector<void*> data;
  for (int i = 0; i < count; ++i) {
    memory.push_back(guarded(static_cast<char*>(buffers[i]), static_cast<size_t>(bytes[i]), at_end != 0));
    if (memory.back().data == nullptr) {
      snprintf(message, message_bytes, "%s: no memory for buffer %d", name, i);
      return 1;
    }
    data.push_back(memory.back().data);
  }
  g_buffers = data.data();
  g_memory = &memory;

  static char alternate[64 << 10];
  stack_t stack = {}, old_stack;
  stack.ss_sp = alternate;
  stack.ss_size = sizeof alternate;
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old_segv, old_bus;
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigaction(SIGSEGV, &action, &old_segv);
  sigaction(SIGBUS, &action, &old_bus);
  g_fault_address = nullptr;
  g_complaint = nullptr;
  volatile int result = 0;
  {
    Environment* volatile scope = flush != kNothing ? new Environment(flush) : nullptr;
    if (sigsetjmp(g_stop, 1) == 0) {
      const int group = group_of(*g_kernel);
      const int64_t groups_x = (threads_x + group - 1) / group;
      for (int64_t y = 0; y < threads_y; ++y)
        for (int64_t x = 0; x < groups_x; ++x) {
          g_place = {static_cast<uint32_t>(x), static_cast<uint32_t>(y), 0};
          run_group(order);
        }
    } else {
      result = 1;
      for (Fiber& fiber : g_fibers) fiber.made = false;  // left where they were
    }
    delete scope;
  }
  sigaction(SIGSEGV, &old_segv, nullptr);
  sigaction(SIGBUS, &old_bus, nullptr);
  sigaltstack(&old_stack, nullptr);

  if (result != 0) {
    int written = snprintf(message, message_bytes, "%s, group (%u, %u), thread %u: ", name, g_place.group_x,
                           g_place.group_y, g_place.local);
    const char* what = g_complaint != nullptr ? g_complaint : "touched memory that is no buffer's";
    for (int i = 0; i < count && g_complaint == nullptr; ++i)
      if (g_fault_address >= memory[i].region && g_fault_address < memory[i].region + memory[i].region_bytes) {
        snprintf(message + written, message_bytes - written, "byte %lld of buffer %d, which has %lld",
                 static_cast<long long>(g_fault_address - memory[i].data), i, static_cast<long long>(bytes[i]));
        what = nullptr;
      }
    if (what != nullptr) snprintf(message + written, message_bytes - written, "%s", what);
  }
  for (int i = 0; i < count; ++i) {
    if (result == 0) give_back(memory[i]);
    munmap(memory[i].region, memory[i].region_bytes);
  }
  return result;
}
