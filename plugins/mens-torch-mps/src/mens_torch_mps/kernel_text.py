"""The Metal source of the lane: the grid kernels, and behind them the lane's own."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from mens_core.kernel_source import grid_source

__all__ = ["metal_matrix_source", "metal_source", "metal_training_source"]

_OWN = ("simd.h", "chunked.h", "write.h", "tripwires.h")
_MATRICES = ("simd.h", "matrices.h")


def metal_source() -> str:
    """Return the kernels that serve, as the compiler gets them; ASCII, as torch hands a text over as that."""
    return grid_source("metal", "serving") + _own(_OWN)


def metal_training_source() -> str:
    """Return the kernels of training: a worker that serves compiles none of them."""
    return grid_source("metal", "training")


def metal_matrix_source() -> str:
    """Return the kernels of SIMD-group matrices.

    They are a text of their own: a compiler that refuses it refuses no other.
    """
    return grid_source("metal", "float_weights") + _own(_MATRICES)


def _own(names: Sequence[str]) -> str:
    own = resources.files("mens_torch_mps").joinpath("kernels")
    return "".join(own.joinpath(name).read_text(encoding="ascii") for name in names)
