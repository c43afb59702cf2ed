// Which instruction set this process runs on; chosen once, and by tests.
#pragma once

namespace vox {

enum class Isa { none = -1, avx2 = 0, avx512 = 1, neon = 2, neon_dot = 3 };
constexpr int kIsaCount = 4;

Isa active_isa();  // the best this machine has, or what `force_isa` chose

// One pointer per instruction set; an operator file fills a table of its own kernels (null where this build
// has none) and reads the active entry. Kernels without an integer dot have no table for `neon_dot`.
template <class Kernels>
struct PerIsa {
  const Kernels* tables[kIsaCount];
  const Kernels& active() const {
    const Kernels* table = tables[static_cast<int>(active_isa())];
    return *(table != nullptr ? table : tables[static_cast<int>(Isa::neon)]);
  }
};

}  // namespace vox
