// How a kernel begins while the one before it ends, and the ways that memory comes to it.

// A kernel of which a multiprocessor shall run so many groups at once: a bound on registers.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define VOX_KERNEL_AT_ONCE(groups, name) extern "C" __global__ __launch_bounds__(kGroup, groups) void name
#else
#define VOX_KERNEL_AT_ONCE(groups, name) extern "C" __global__ void name
#endif

// Shared memory, of which the launch gives more than a text can declare. Where kernels run as C++ each says how much.
#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define VOX_ASKED(quads, name) extern __shared__ Quad name[]
#define VOX_ASKS(kernel, quads)
#define VOX_ASKS_AT_MOST(kernel, quads)
#else
#define VOX_ASKED(quads, name) VOX_SHARED Quad name[quads]
#define VOX_ASKS(kernel, quads) extern "C" { int32_t kernel##_asks = 16 * (quads); }
#define VOX_ASKS_AT_MOST(kernel, quads) extern "C" { int32_t kernel##_asks_at_most = 16 * (quads); }
#endif

namespace vox {
namespace VOX_ISA {

// Until here, nothing that an earlier kernel writes may be read, and nothing written.
CANON void inputs_are_there() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start when all groups said so, or ended: earlier, its groups would take the place of this
// one's, and its first weights that of this one's inputs.
CANON void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
CANON void wait_for_inputs() {
  inputs_are_there();
  let_next_start();
}

// A load that stays where it is written, before barriers and before it is used.
CANON float early(const float* from) {
#if defined(__CUDA_ARCH__)
  float to;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(to) : "l"(from));
  return to;
#else
  return *from;
#endif
}

// Weights are read once: they need no place in the first cache. Volatile, so that it stays before a barrier.
CANON Piece streamed(const Piece* from) {
#if defined(__CUDA_ARCH__)
  Piece to;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to.words[0]), "=r"(to.words[1]), "=r"(to.words[2]), "=r"(to.words[3])
               : "l"(from));
  return to;
#else
  return *from;
#endif
}

// On its way into the second cache.
CANON void expected(const void* line) {
#if defined(__CUDA_ARCH__)
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
#endif
}

// Sixteen bytes, on their way into shared memory through no register. `arrived_all` and a barrier end the way.
CANON void sent(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
#else
  for (int i = 0; i < 4; ++i) ((uint32_t*)to)[i] = ((const uint32_t*)from)[i];
#endif
}
// The same by way of the first cache: groups of a multiprocessor that ask for a long row ask the second cache once.
CANON void sent_shared(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)), "l"(from)
               : "memory");
#else
  sent(to, from);
#endif
}
CANON void arrived_all() {
#if defined(__CUDA_ARCH__)
  asm volatile("cp.async.wait_all;" ::: "memory");
#endif
}

// What threads of one warp wrote before is there for the others.
CANON void warp_barrier() {
#if defined(__CUDA_ARCH__)
  __syncwarp();
#else
  VOX_BARRIER();
#endif
}

}  // namespace VOX_ISA
}  // namespace vox
