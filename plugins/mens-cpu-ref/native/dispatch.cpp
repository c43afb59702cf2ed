// Compiled for the baseline of the architecture, so that it can refuse politely where the
// kernels would die of an illegal instruction.
#include "dispatch.h"

#include <string.h>

#include <atomic>
#include <initializer_list>

#include "abi.h"
#include "pool.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <stdint.h>
#elif defined(__linux__)
#include <sys/auxv.h>
#endif

namespace vox {
namespace {

#if defined(__x86_64__)
struct X86 {
  bool v3 = false;       // x86-64-v3 with the state saved by the system
  bool avx512 = false;   // F, BW, CD, DQ, VL and VNNI, with the state saved by the system
};

uint64_t read_xcr0() {
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

X86 probe_x86() {
  X86 found;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return found;
  const unsigned need1 = bit_SSE3 | bit_SSSE3 | bit_SSE4_1 | bit_SSE4_2 | bit_POPCNT | bit_MOVBE | bit_FMA |
                         bit_AVX | bit_F16C | bit_OSXSAVE | (1u << 13) /* cmpxchg16b */;
  if ((c & need1) != need1) return found;
  unsigned b7, c7, d7;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return found;
  const unsigned need7 = bit_AVX2 | bit_BMI | (1u << 8) /* BMI2 */;
  if ((b7 & need7) != need7) return found;
  if (!__get_cpuid(0x80000001u, &a, &b, &c, &d) || (c & (1u << 5)) == 0 /* LZCNT */) return found;
  const uint64_t saved = read_xcr0();
  found.v3 = (saved & 0x6) == 0x6;
  const unsigned need512 = (1u << 16) | (1u << 17) | (1u << 28) | (1u << 30) | (1u << 31);
  found.avx512 = found.v3 && (b7 & need512) == need512 && (c7 & (1u << 11)) != 0 && (saved & 0xE6) == 0xE6;
  return found;
}
#else
// Armv8.2's integer dot product. What runs macOS on Arm has it.
bool has_dot() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & (1ul << 20) /* HWCAP_ASIMDDP */) != 0;
#else
  return true;
#endif
}
#endif

bool has(Isa isa) {
#if defined(__x86_64__)
  static const X86 machine = probe_x86();
  return (isa == Isa::avx2 && machine.v3) || (isa == Isa::avx512 && machine.avx512);
#else
  static const bool dot = has_dot();
  return isa == Isa::neon || (isa == Isa::neon_dot && dot);
#endif
}

Isa best() {
  for (Isa isa : {Isa::avx512, Isa::avx2, Isa::neon_dot, Isa::neon})
    if (has(isa)) return isa;
  return Isa::none;
}

const char* const kNames[kIsaCount] = {"avx2", "avx512", "neon", "neon_dot"};

std::atomic<Isa>& chosen() {
  static std::atomic<Isa> isa{best()};
  return isa;
}

}  // namespace

Isa active_isa() { return chosen().load(std::memory_order_relaxed); }

}  // namespace vox

extern "C" {

const char* vox_isa(void) {
  const vox::Isa isa = vox::active_isa();
  return isa == vox::Isa::none ? "" : vox::kNames[static_cast<int>(isa)];
}

int vox_force_isa(const char* name) {
  if (name == nullptr || name[0] == '\0') {
    vox::chosen().store(vox::best());
    return 0;
  }
  for (int i = 0; i < vox::kIsaCount; ++i) {
    const auto isa = static_cast<vox::Isa>(i);
    if (strcmp(name, vox::kNames[i]) == 0 && vox::has(isa)) {
      vox::chosen().store(isa);
      return 0;
    }
  }
  return -1;
}

int vox_abi_version(void) { return VOX_ABI_VERSION; }
int vox_set_threads(int count) { return vox::set_threads(count); }
int vox_threads(void) { return vox::threads(); }
void vox_set_spin_us(int64_t microseconds) { vox::set_spin_microseconds(microseconds); }
}
