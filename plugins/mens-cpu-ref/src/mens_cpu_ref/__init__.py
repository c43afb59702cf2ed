"""The CPU lane: the scalar reference that defines the bits, and SIMD kernels proven equal to it."""
