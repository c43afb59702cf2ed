"""Rotary tables that grow as positions are reached, made natively by integers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mens_core.ops import BLOCK
from mens_cpu_ref.arrays import address_of
from mens_cpu_ref.library import Function

__all__ = ["RotaryTable"]

_FACTOR_BITS = 64
_LOW = (1 << 64) - 1


class RotaryTable:
    """Cosines and sines [position, 2, pairs] of positions 0 to `positions`.

    The definition is docs/numerics.md, RoPE. `address` changes when the table grows.
    """

    __slots__ = ("_factor", "_frequencies", "_make", "_table", "address", "pairs", "positions")

    def __init__(
        self, make: Function, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> None:
        numerator, denominator = attention_factor or (1, 1)
        self._make = make
        self._factor = (numerator << _FACTOR_BITS) // denominator
        self._frequencies = np.array([[f & _LOW, f >> 64] for f in frequencies], np.uint64)
        self.pairs = len(frequencies)
        self.positions = 0
        self._table: npt.NDArray[np.float32] = np.empty((0, 2, self.pairs), np.float32)
        self.address = 0

    def reach(self, position: int) -> None:
        """Make the blocks up to and including `position`."""
        wanted = (position // BLOCK + 1) * BLOCK
        if wanted <= self.positions:
            return
        if wanted > len(self._table):
            grown = np.empty((max(wanted, 2 * len(self._table)), 2, self.pairs), np.float32)
            grown[: self.positions] = self._table[: self.positions]
            self._table, self.address = grown, address_of(grown)
        self._make(
            address_of(self._frequencies),
            self.pairs,
            self._factor & _LOW,
            self._factor >> 64,
            self.positions,
            wanted - self.positions,
            address_of(self._table[self.positions :]),
        )
        self.positions = wanted
