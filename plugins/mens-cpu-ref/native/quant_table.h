// The quantised kernels of the instruction set in use, and what only a replay asks of them.
#pragma once
#include "quant_kernels.h"

namespace vox {

const QuantKernels& quant_kernels_in_use();

struct QuantProduct {
  int32_t format;
  const uint8_t* packed;
  int64_t outputs, columns;
  const uint8_t* activations;
};
// out [rows][outputs] = gate of two products, which are not written; as `run`.
int64_t run_gated(const QuantProduct& gate, const QuantProduct& up, bool is_silu, int64_t rows, float* out);

}  // namespace vox
