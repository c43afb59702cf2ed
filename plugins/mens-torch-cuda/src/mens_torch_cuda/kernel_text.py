"""The CUDA source of the lane: the grid kernels, and behind them the ones with faster layouts."""

from __future__ import annotations

from importlib import resources

from mens_core.kernel_source import grid_source

__all__ = ["cuda_source"]


def cuda_source() -> str:
    """Return the text that NVRTC gets."""
    packed = resources.files("mens_torch_cuda").joinpath("kernels", "packed.h").read_text(encoding="utf-8")
    return grid_source("cuda") + packed
