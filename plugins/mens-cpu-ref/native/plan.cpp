#include "plan.h"

#include <stddef.h>
#include <string.h>

#include <utility>

namespace vox {
namespace {

thread_local Plan* t_collecting = nullptr;

constexpr int64_t kPieceBytes = 64 << 10;

struct Link {
  Work work;
  int64_t share;  // parts of it in a unit
};
struct ChainTask {
  const Link* links;
  size_t count;
};

int64_t chain_part(const void* task, int64_t begin, int64_t end, void* scratch) {
  const auto& chain = *static_cast<const ChainTask*>(task);
  int64_t fault = 0;
  for (int64_t unit = begin; unit < end; ++unit)
    for (size_t i = 0; i < chain.count; ++i) {
      const Link& link = chain.links[i];
      const int64_t first = unit * link.share, last = first + link.share;
      if (first >= link.work.parts) continue;
      const int64_t found =
          link.work.part(link.work.task, first, last < link.work.parts ? last : link.work.parts, scratch);
      if (fault == 0) fault = found;
    }
  return fault;
}

}  // namespace

int64_t run(const Work& work) {
  if (work.parts <= 0) return 0;
  if (t_collecting != nullptr) {
    t_collecting->add(work);
    return 0;
  }
  Stage stage{work, false};
  const int64_t code = run_stages(&stage, 1);
  return code != 0 ? code : stage.fault;
}

Plan::Plan(int64_t works) {
  stages_.reserve(static_cast<size_t>(works));
  t_collecting = this;
}

Plan::~Plan() {
  if (t_collecting == this) t_collecting = nullptr;
}

Plan* Plan::collecting() { return t_collecting; }

void Plan::add(const Work& work) {
  const int64_t bytes = (work.task_bytes + 15) / 16 * 16;
  if (left_ < bytes) {
    left_ = bytes > kPieceBytes ? bytes : kPieceBytes;
    memory_.emplace_back(new char[static_cast<size_t>(left_)]);
  }
  left_ -= bytes;
  char* task = memory_.back().get() + left_;
  memcpy(task, work.task, static_cast<size_t>(work.task_bytes));
  stages_.push_back({work, joins_});
  stages_.back().work.task = task;
}

void Plan::chain(size_t first, const std::vector<int64_t>& shares, int64_t units) {
  std::vector<Link> links;
  int64_t nanoseconds = 0, scratch_bytes = 0;
  for (size_t i = first; i < stages_.size(); ++i) {
    const Work& work = stages_[i].work;
    links.push_back({work, shares[i - first]});
    nanoseconds += work.parts * work.nanoseconds_per_part;
    if (work.scratch_bytes > scratch_bytes) scratch_bytes = work.scratch_bytes;
  }
  stages_.erase(stages_.begin() + static_cast<ptrdiff_t>(first), stages_.end());
  const size_t count = links.size();
  const ChainTask task{keep(std::move(links)), count};
  joins_ = false;
  add(Work(chain_part, &task, units, nanoseconds / units, scratch_bytes));
}

int64_t Plan::run() {
  t_collecting = nullptr;
  if (stages_.empty()) return 0;
  if (const int64_t code = run_stages(stages_.data(), static_cast<int64_t>(stages_.size())); code != 0) return code;
  for (size_t i = 0; i < stages_.size(); ++i)
    if (stages_[i].fault != 0) return stages_[i].fault < 0 ? kOutOfMemory : static_cast<int64_t>(i) + 1;
  return 0;
}

}  // namespace vox
