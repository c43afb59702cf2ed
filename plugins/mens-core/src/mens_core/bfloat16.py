"""float32 to bfloat16, as adapters and merged models are written (docs/numerics.md)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["to_bfloat16"]


def to_bfloat16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Return the bits of each value's nearest bfloat16, ties to even, little-endian.

    Raises:
        ValueError: a value is not finite, or too great for bfloat16; its index is named.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    # Half a unit of the last place that stays, less one where that place is even: a tie then rounds to even.
    kept = (bits >> np.uint32(16)) & np.uint32(1)
    with np.errstate(over="ignore"):
        rounded = (bits + np.uint32(0x7FFF) + kept) >> np.uint32(16)
    beyond = np.flatnonzero((bits & np.uint32(0x7FFFFFFF)) >= np.uint32(0x7F7F8000))
    if len(beyond):
        where = [int(i) for i in np.unravel_index(beyond[0], values.shape)]
        raise ValueError(f"element {where} is {values[tuple(where)]}, which no finite bfloat16 is near")
    is_subnormal = (bits & np.uint32(0x7F800000)) == 0
    return np.where(is_subnormal, (bits >> np.uint32(31)) << np.uint32(15), rounded).astype("<u2")
