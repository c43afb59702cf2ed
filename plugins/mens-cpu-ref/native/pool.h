// Threads that split outputs, never a sum: which thread computes a part changes no bit.
#pragma once
#include <stdint.h>

namespace vox {

// Computes the outputs of parts [begin, end) and returns 0, or 1 + the first row whose output
// is not finite. `scratch` is the thread's own, 64-byte aligned, of the size asked for in `Work`.
using Part = int64_t (*)(const void* task, int64_t begin, int64_t end, void* scratch);

struct Work {
  Part part;
  const void* task;
  int64_t task_bytes;
  int64_t parts;
  int64_t nanoseconds_per_part;  // an estimate; decides between one thread and all of them
  int64_t scratch_bytes;
  // Memory that the parts read once: part i begins at stream + i * stream_step. Null: nothing worth fetching early.
  const void* stream = nullptr;
  int64_t stream_step = 0;

  template <class Task>
  Work(Part part, const Task* task, int64_t parts, int64_t nanoseconds_per_part, int64_t scratch_bytes = 0)
      : part(part),
        task(task),
        task_bytes(sizeof(Task)),
        parts(parts),
        nanoseconds_per_part(nanoseconds_per_part < 1 ? 1 : nanoseconds_per_part),
        scratch_bytes(scratch_bytes) {}

  void reads(const void* memory, int64_t bytes_per_part) {
    stream = memory;
    stream_step = bytes_per_part;
  }
};

// Runs all parts with the environment of flush.h; returns 0, 1 + the first row that is not finite, or
// kOutOfMemory. While a `Plan` collects on this thread, `run` only notes the work and returns 0.
int64_t run(const Work& work);

constexpr int64_t kOutOfMemory = -1;

int set_threads(int count);  // 0, or -1 where the system refuses a thread
int threads();
void set_spin_microseconds(int64_t microseconds);

}  // namespace vox
