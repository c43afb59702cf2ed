"""Looks on the device for an infinity or NaN among weights."""

from __future__ import annotations

import torch

from mens_core.grid_weights import Floats

__all__ = ["are_finite"]

_LOOKED_AT = 1 << 26
"""Elements of a weight that are looked at at once."""
_INTEGERS = {2: torch.int16, 4: torch.int32}


def are_finite(buffer: torch.Tensor, floats: Floats) -> bool:
    """Whether no exponent of the floats in a buffer is all ones; waits for the device."""
    table = buffer.view(_INTEGERS[floats.size]).view(-1, floats.block // floats.size)
    found = torch.zeros((), dtype=torch.bool, device=buffer.device)
    rows = max(1, _LOOKED_AT // table.shape[1])
    # Piece by piece: what is looked at is never laid beside the whole tensor.
    for first in range(0, table.shape[0], rows):
        for place in floats.places:
            bits = table[first : first + rows, place // floats.size]
            found |= ((bits & floats.exponent) == floats.exponent).any()
    return not bool(found)
