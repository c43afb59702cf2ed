"""The CUDA lane: the grid kernels of `mens_core` on NVIDIA GPUs, with torch for memory and streams."""
