"""a * b + c rounded once to float32, in numpy, and the float64 shortcut that rounds twice.

numpy has no fma. A product of two float32 is exact in float64; the sum is not, and a float64 sum
that happens to lie half way between two float32 is rounded again, the wrong way. Rounding the
sum to odd leaves the second rounding the information it needs.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["double_rounded", "flushed", "fma", "fused"]

_F32, _F64 = np.float32, np.float64
_SMALLEST = _F32(2.0**-126)

Floats = npt.NDArray[np.float32]


def flushed(x: npt.ArrayLike) -> Floats:
    """Return float32 numbers of which those below 2^-126 are zero, of their sign."""
    x = np.asarray(x, _F32)
    return np.where(np.abs(x) < _SMALLEST, np.copysign(_F32(0), x), x)


def fma(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """Return a * b + c, rounded once to nearest even and flushed; operands are float32 and broadcast."""
    return flushed(fused(a, b, c))


def fused(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """Return the same with what is subnormal."""
    with np.errstate(all="ignore"):
        product = np.asarray(a, _F64) * np.asarray(b, _F64)
        c = np.asarray(c, _F64)
        total = np.atleast_1d(product + c)
        # What the sum lost, exactly (Knuth's two-sum).
        virtual = total - product
        lost = (product - (total - virtual)) + (c - virtual)
        bits = total.view(np.int64)
        # An even last bit and something lost: to the odd neighbour on the side of the loss.
        step = np.where((lost > 0) == (total > 0), 1, -1)
        is_wrong = (lost != 0) & (bits & 1 == 0) & np.isfinite(total) & (total != 0)
        odd = np.where(is_wrong, bits + step, bits).view(_F64)
        return odd.astype(_F32).reshape(np.broadcast_shapes(product.shape, c.shape))


def double_rounded(a: npt.ArrayLike, b: npt.ArrayLike, c: npt.ArrayLike) -> Floats:
    """Return a * b + c rounded to float64 and again to float32: a mistake, on purpose."""
    with np.errstate(all="ignore"):
        total = np.asarray(a, _F64) * np.asarray(b, _F64) + np.asarray(c, _F64)
        return flushed(total.astype(_F32))
