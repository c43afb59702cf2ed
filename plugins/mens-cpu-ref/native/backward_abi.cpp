// The C ABI of the backward operators: pointers in, a task for the pool out.
#include "backward_abi.h"

#include <new>

#include "backward_attention.h"
#include "backward_kernels.h"

namespace {

using namespace vox;

const PerIsa<BackwardKernels> kBackward = {{
#if defined(VOX_HAS_AVX2)
    &avx2::backward_kernels, &avx512::backward_kernels, nullptr,
#else
    nullptr, nullptr, &neon::backward_kernels,
#endif
}};

int64_t parts_of(int64_t total, int64_t size) { return (total + size - 1) / size; }

int64_t run_gate(Part part, const GateBackwardTask& task) {
  return run({part, &task, parts_of(task.elements, kElementsPerPart), 1600});
}

}  // namespace

extern "C" {

int64_t vox_norm_backward(const float* dy, const float* x, const float* weight, int64_t rows, int64_t heads,
                          int64_t width, float eps, float* dx) {
  const NormBackwardTask task{dy, x, weight, dx, rows * heads, width, heads, eps};
  return run({kBackward.active().norm, &task, parts_of(task.rows, kNormRows), kNormRows * width});
}

int64_t vox_rope_backward(const float* dy, int64_t rows, int64_t heads, int64_t pairs, const float* table,
                          const int32_t* slots, int64_t slot_count, const int32_t* positions, float* dx) {
  for (int64_t r = 0; r < rows; ++r)
    if (positions[r] < 0 || positions[r] / kBlock >= slot_count || slots[positions[r] / kBlock] < 0)
      return VOX_OUT_OF_RANGE;
  const RopeTask task{dy, dx, table, slots, positions, heads, pairs};
  return run({kBackward.active().rope, &task, rows, heads * pairs / 2});
}

int64_t vox_silu_gate_backward(const float* dy, const float* gate, const float* up, int64_t rows, int64_t width,
                               float* dgate, float* dup) {
  return run_gate(kBackward.active().silu_gate, {dy, gate, up, dgate, dup, rows * width, width});
}

int64_t vox_gelu_gate_backward(const float* dy, const float* gate, const float* up, int64_t rows, int64_t width,
                               float* dgate, float* dup) {
  return run_gate(kBackward.active().gelu_gate, {dy, gate, up, dgate, dup, rows * width, width});
}

int64_t vox_softcap_backward(const float* dy, const float* x, int64_t rows, int64_t width, float cap, float* dx) {
  const ElementwiseTask task{dy, x, dx, rows * width, width, cap};
  return run({kBackward.active().softcap, &task, parts_of(task.elements, kElementsPerPart), 1600});
}

int64_t vox_attention_backward(const float* dy, const float* q, const float* out, const float* m, const float* l,
                               int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                               const int32_t* positions, const int32_t* starts, const int32_t* block_tables,
                               int64_t sequences, int64_t blocks_per_sequence, int64_t blocks, const float* keys,
                               const float* values, float scale, int64_t window, float softcap, float* dq, float* dk,
                               float* dv) {
  AttentionBackwardTask task{};
  task.layer = {const_cast<float*>(keys), const_cast<float*>(values), kv_heads, head_dim,
                parts_of(head_dim, kPanel) * kPanel};
  task.rows = {positions, starts, block_tables, sequences, blocks_per_sequence};
  task.dy = dy;
  task.q = q;
  task.out = out;
  task.m = m;
  task.l = l;
  task.dq = dq;
  task.dk = dk;
  task.dv = dv;
  task.heads = heads;
  task.scale = scale;
  task.window = window;
  task.softcap = softcap;
  if (!is_whole(task.rows, rows, blocks)) return VOX_OUT_OF_RANGE;
  if (rows == 0) return 0;
  try {
    return run_attention_backward(kBackward.active(), task, rows);
  } catch (const std::bad_alloc&) {
    return VOX_OUT_OF_MEMORY;
  }
}
}
