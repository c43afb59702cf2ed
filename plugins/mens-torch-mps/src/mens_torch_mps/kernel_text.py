"""The Metal source of the lane: the grid kernels, and behind them the lane's own."""

from __future__ import annotations

from importlib import resources

from mens_core.kernel_source import grid_source

__all__ = ["metal_source"]

_OWN = ("chunked.h", "write.h", "tripwires.h")


def metal_source() -> str:
    """Return the text that Metal's compiler gets; ASCII, as torch hands it over as that."""
    own = resources.files("mens_torch_mps").joinpath("kernels")
    return grid_source("metal") + "".join(own.joinpath(name).read_text(encoding="ascii") for name in _OWN)
