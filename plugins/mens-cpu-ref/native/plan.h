// Several works that the threads go through in one go, without meeting the caller in between.
#pragma once
#include <memory>
#include <vector>

#include "pool.h"

namespace vox {

// A work on its way through the pool, which fills in all but the first two members.
struct Stage {
  Work work;
  bool joins;                // may run beside the stage before it; else it waits for that one and all of its group
  int64_t grain = 1;         // parts of one ticket
  int64_t first_ticket = 0;  // tickets [first_ticket, end_ticket) are this stage's; small ones share one
  int64_t end_ticket = 0;
  int64_t needs = 0;  // so many tickets, counted from the first, must be done before one of these starts
  int64_t fault = 0;  // what its parts returned: kOutOfMemory, else the least that is not 0
};

// Runs the stages on the pool; 0, or kOutOfMemory where no thread is to be had.
int64_t run_stages(Stage* stages, int64_t count);

// While one exists on a thread, that thread's `run` adds to it.
class Plan {
 public:
  explicit Plan(int64_t works);
  ~Plan();
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;

  // The plan that collects on this thread, or null.
  static Plan* collecting();

  // Whether the works that follow belong to the group of the last one.
  void join(bool joins) { joins_ = joins; }
  // Copies the work and its task; what the task points to must outlive the plan.
  void add(const Work& work);
  // Makes one work of those from the `first` one on: `units` parts, each of which does `shares[i]` parts of the i-th of
  // them, one after the other. So what one leaves in a core's cache is there for the next, and nobody waits in between.
  void chain(size_t first, const std::vector<int64_t>& shares, int64_t units);
  size_t works() const { return stages_.size(); }
  // Keeps a task's array as long as the plan.
  template <class Element>
  const Element* keep(std::vector<Element>&& array) {
    auto kept = std::make_shared<std::vector<Element>>(static_cast<std::vector<Element>&&>(array));
    kept_.push_back(kept);
    return kept->data();
  }

  // Collects no more and runs; 0, kOutOfMemory, or 1 + the index of the first work with a row that is not finite.
  int64_t run();

 private:
  std::vector<Stage> stages_;
  std::vector<std::unique_ptr<char[]>> memory_;  // of the tasks, in pieces
  int64_t left_ = 0;                             // bytes of the last piece that are free
  std::vector<std::shared_ptr<void>> kept_;
  bool joins_ = false;
};

}  // namespace vox
