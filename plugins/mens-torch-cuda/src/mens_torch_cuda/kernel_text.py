"""The CUDA source of the lane: the grid kernels, and behind them the ones with faster layouts."""

from __future__ import annotations

from importlib import resources

from mens_core.kernel_source import grid_source

__all__ = ["cuda_source"]

_OURS = (
    *("packed.h", "super.h", "ways.h", "row_norm.h", "step_weights.h", "step.h"),
    *("attend.h", "one_row.h", "between.h", "attend_few.h"),
    *("tiles.h", "few_rows.h", "ring_rows.h", "chains.h", "row_tiles.h", "sliced.h", "many_rows.h"),
    *("warpgroup_tiles.h", "attend_rows.h", "some_rows.h", "broad.h", "heads.h", "pairs.h", "thin.h"),
    "sums.h",
)
"""In this order, behind the grid kernels."""


def cuda_source() -> str:
    """Return the text that NVRTC gets."""
    folder = resources.files("mens_torch_cuda").joinpath("kernels")
    return grid_source("cuda") + "".join(folder.joinpath(name).read_text(encoding="utf-8") for name in _OURS)
