// Runs a grid of threads on the CPU: groups one after another, the threads of a group from barrier to
// barrier, each on a stack of its own. What threads do to shared memory between two barriers is compared:
// a value that one wrote and another reads or writes there is an error, whatever the order they ran in.
#pragma once
#include <stddef.h>
#include <stdint.h>

namespace vox_shim {

constexpr int kGroup = 128;  // threads of a group, all in x, of a kernel that says nothing else
constexpr int kMostOfGroup = 512;

struct Place {
  uint32_t group_x, group_y, local;
};

// Of the thread that asks.
const Place& current();

// Returns when every thread of the group is here. A group of which a thread ends instead is an error.
void barrier();

// Whether the barrier of this number is there, for sources in which each asks.
bool is_kept(int number);

// The threads of a SIMD group: how many, and which of them asks. Set per run: 32 on Apple's GPUs so far.
uint32_t simd_width();

// Four bytes of each thread of a SIMD group, seen by all of it. They must all be here.
uint32_t simd_exchange(uint32_t mine, uint32_t from);

// The place of the thread that asks in its SIMD group.
uint32_t simd_lane();

// c and eight products, added in the order that was set (matrices.cpp).
float matrix_sum(const float* a, const float* b, float c);

// One kernel: `call` passes the buffers on, the last being the constants.
struct Kernel {
  const char* name;
  void (*call)(void* const* buffers, const Place& place);
  int buffers;  // with the constants
  size_t constants;  // bytes
  const int32_t* threads;  // of a group; null: kGroup
};
inline int group_of(const Kernel& kernel) { return kernel.threads == nullptr ? kGroup : *kernel.threads; }
extern const Kernel kKernels[];
extern const int kKernelCount;

// What has happened to one value of shared memory in this group. Stretches between barriers are numbered.
struct Seen {
  int written_in;  // 0: not yet
  int writer;
  int read_in;
  int reader;  // kSeveral: more than one
};
constexpr int kSeveral = -2;
void note_write(Seen& seen);
void note_read(Seen& seen);

// Memory of a group's threads in common. It holds what no kernel can have meant before each group
// starts, and what is read before it is written is an error.
void register_shared(void* memory, size_t bytes, Seen* seen, int count);
[[noreturn]] void shared_out_of_bounds();

// A pointer into it, as a function takes one. Reading and writing are told apart by the builder: an
// element on the left of an assignment becomes `to_write(...)`.
template <class T>
struct SharedPointer {
  T* values;
  Seen* seen;
  int size;
  T operator[](int i) const {
    if (i < 0 || i >= size) shared_out_of_bounds();
    note_read(seen[i]);
    return values[i];
  }
  SharedPointer operator+(int64_t n) const { return {values + n, seen + n, size - static_cast<int>(n)}; }
};
template <class T, int N>
struct Shared {
  T values[N];
  Seen seen[N];
  Shared() { register_shared(values, sizeof values, seen, N); }
  T operator[](int i) { return SharedPointer<T>{values, seen, N}[i]; }
  operator SharedPointer<T>() { return {values, seen, N}; }
  SharedPointer<T> operator+(int64_t n) { return static_cast<SharedPointer<T>>(*this) + n; }
};
template <class T>
T& to_write(SharedPointer<T> shared, int64_t i) {
  if (i < 0 || i >= shared.size) shared_out_of_bounds();
  note_write(shared.seen[i]);
  return shared.values[i];
}
template <class T, int N>
T& to_write(Shared<T, N>& shared, int64_t i) {
  return to_write(static_cast<SharedPointer<T>>(shared), i);
}
template <class T>
T& to_write(T* values, int64_t i) {
  return values[i];
}

// Where pointers to it are plain ones (CUDA): bounded and poisoned, and not watched.
template <class T, int N>
struct Unwatched {
  T values[N];
  Unwatched() { register_shared(values, sizeof values, nullptr, 0); }
  T& operator[](int i) {
    if (i < 0 || i >= N) shared_out_of_bounds();
    return values[i];
  }
  operator T*() { return values; }
};

}  // namespace vox_shim
