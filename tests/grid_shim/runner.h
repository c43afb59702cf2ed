// Runs a grid of threads on the CPU: groups one after another, the threads of a group from barrier to
// barrier, each on a stack of its own.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace vox_shim {

constexpr int kGroup = 128;  // threads of a group, all in x

struct Place {
  uint32_t group_x, group_y, local;
};

// Of the thread that asks.
const Place& current();

// Returns when every thread of the group is here. A group of which a thread ends instead is an error.
void barrier();

// Whether the barrier of this number is there, for sources in which each asks.
bool is_kept(int number);

// One kernel: `call` passes the buffers on, the last being the constants.
struct Kernel {
  const char* name;
  void (*call)(void* const* buffers, const Place& place);
  int buffers;  // with the constants
  size_t constants;  // bytes
};
extern const Kernel kKernels[];
extern const int kKernelCount;

// Memory of a group's threads in common. It holds what no kernel can have meant before each group
// starts, so that what is read before it is written shows.
void register_shared(void* memory, size_t bytes);
[[noreturn]] void shared_out_of_bounds();
template <class T, int N>
struct Shared {
  T values[N];
  Shared() { register_shared(values, sizeof values); }
  T& operator[](int i) {
    if (i < 0 || i >= N) shared_out_of_bounds();
    return values[i];
  }
  operator T*() { return values; }
};

}  // namespace vox_shim
