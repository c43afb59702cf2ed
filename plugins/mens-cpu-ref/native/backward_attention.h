// How attention's backward is cut into passes, rounds and items. No cut changes a bit.
#pragma once
#include "backward_kernels.h"

namespace vox {

// Whether every sequence's rows are its positions from 0 on, and their blocks are there.
bool is_whole(const Rows& rows, int64_t count, int64_t blocks);

// Runs the task over all streams; returns 0, 1 + the first row with a gradient that is not finite, or
// kOutOfMemory. Throws std::bad_alloc.
int64_t run_attention_backward(const BackwardKernels& kernels, AttentionBackwardTask task, int64_t rows);

}  // namespace vox
