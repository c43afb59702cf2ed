// The C ABI of the float operators: pointers in, a task for the pool out.
#include "abi.h"

#include "float_kernels.h"
#include "tasks.h"

namespace {

const vox::PerIsa<vox::FloatKernels> kFloat = {{
#if defined(VOX_HAS_AVX2)
    &vox::avx2::float_kernels, &vox::avx512::float_kernels, nullptr,
#else
    nullptr, nullptr, &vox::neon::float_kernels,
#endif
}};

int64_t run_elementwise(vox::Part part, const vox::ElementwiseTask& task, int64_t nanoseconds_per_part) {
  const int64_t parts = (task.elements + vox::kElementsPerPart - 1) / vox::kElementsPerPart;
  return vox::run({part, &task, parts, nanoseconds_per_part});
}

}  // namespace

extern "C" {

int64_t vox_add(const float* a, const float* b, int64_t rows, int64_t width, float* out) {
  return run_elementwise(kFloat.active().add, {a, b, out, rows * width, width, 0.0f}, 150);
}
}
