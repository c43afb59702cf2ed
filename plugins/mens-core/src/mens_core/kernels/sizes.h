// Sizes that are part of the arithmetic or of a layout that several kernels share.
#pragma once
#include "canon.h"

namespace vox {

enum : int64_t {
  kChunk = 128,  // terms of a C128 chunk
  kBlock = 128,  // positions of a KV block
};

}  // namespace vox
