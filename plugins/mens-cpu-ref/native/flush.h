// The floating-point environment of every kernel: round to nearest even, subnormals flushed.
//
// Set on entry and restored on exit, in the calling thread and in every pool thread, so that
// nothing outside this library ever sees it and nothing outside can change our bits.
#pragma once
#include <stdint.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace vox {

class FlushScope {
 public:
#if defined(__x86_64__)
  // All exceptions masked (0x1F80), flush-to-zero (0x8000), denormals-are-zero (0x0040).
  FlushScope() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80u | 0x8000u | 0x0040u); }
  ~FlushScope() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushScope() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    const uint64_t flush = uint64_t{1} << 24;  // FPCR.FZ
    __asm__ volatile("msr fpcr, %0" ::"r"(flush) : "memory");
  }
  ~FlushScope() { __asm__ volatile("msr fpcr, %0" ::"r"(saved_) : "memory"); }

 private:
  uint64_t saved_;
#else
#error "mens-cpu-ref supports x86-64 and aarch64 only"
#endif
 public:
  FlushScope(const FlushScope&) = delete;
  FlushScope& operator=(const FlushScope&) = delete;
};

}  // namespace vox
