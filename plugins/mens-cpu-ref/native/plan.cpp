#include "plan.h"

#include <string.h>

namespace vox {
namespace {

thread_local Plan* t_collecting = nullptr;

constexpr int64_t kPieceBytes = 64 << 10;

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

int64_t Plan::run() {
  t_collecting = nullptr;
  if (stages_.empty()) return 0;
  if (const int64_t code = run_stages(stages_.data(), static_cast<int64_t>(stages_.size())); code != 0) return code;
  for (size_t i = 0; i < stages_.size(); ++i)
    if (stages_[i].fault != 0) return stages_[i].fault < 0 ? kOutOfMemory : static_cast<int64_t>(i) + 1;
  return 0;
}

}  // namespace vox
