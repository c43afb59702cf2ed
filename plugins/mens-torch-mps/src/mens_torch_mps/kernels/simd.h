// A thread's place in its SIMD group, as further parameters of a kernel. Metal alone compiles this, behind the grid
// kernels, and has its SIMD width from the device.
#define VOX_SIMD                                                                                           \
  uint32_t vox_simd_width [[threads_per_simdgroup]], uint32_t vox_simd_lane [[thread_index_in_simdgroup]], \
      uint32_t vox_simd_group [[simdgroup_index_in_threadgroup]]
