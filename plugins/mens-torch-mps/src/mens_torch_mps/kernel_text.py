"""The Metal source of the lane: the grid kernels, and behind them the lane's own."""

from __future__ import annotations

from importlib import resources

from mens_core.kernel_source import grid_source

__all__ = ["metal_source", "metal_training_source"]

_OWN = ("chunked.h", "write.h", "tripwires.h")


def metal_source() -> str:
    """Return the kernels that serve, as the compiler gets them; ASCII, as torch hands a text over as that."""
    own = resources.files("mens_torch_mps").joinpath("kernels")
    return grid_source("metal", "serving") + "".join(
        own.joinpath(name).read_text(encoding="ascii") for name in _OWN
    )


def metal_training_source() -> str:
    """Return the kernels of training: a worker that serves compiles none of them."""
    return grid_source("metal", "training")
