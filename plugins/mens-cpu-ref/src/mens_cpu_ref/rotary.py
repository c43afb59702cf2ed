"""Rotary tables made block by block as positions are reached, natively and by integers alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mens_core.ops import BLOCK, Ints
from mens_cpu_ref.arrays import address_of
from mens_cpu_ref.library import Function

__all__ = ["RotaryTable"]

_FACTOR_BITS = 64
_LOW = (1 << 64) - 1


class RotaryTable:
    """Cosines and sines [slot, 128, 2, pairs] of the blocks of positions met so far.

    The definition is docs/numerics.md, RoPE. `arguments` are what `rope` passes on: pairs,
    table, slots, number of slots; they change when a block is made.
    """

    __slots__ = ("_factor", "_frequencies", "_made", "_make", "_slots", "_table", "arguments", "pairs")

    def __init__(
        self, make: Function, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> None:
        numerator, denominator = attention_factor or (1, 1)
        self._make = make
        self._factor = (numerator << _FACTOR_BITS) // denominator
        self._frequencies = np.array([[f & _LOW, f >> 64] for f in frequencies], np.uint64)
        self.pairs = len(frequencies)
        self._made = 0
        self._table: npt.NDArray[np.float32] = np.empty((0, BLOCK, 2, self.pairs), np.float32)
        self._slots: Ints = np.empty(0, np.int32)
        self.arguments = (self.pairs, 0, 0, 0)

    def reach(self, positions: Ints) -> None:
        """Make the blocks that these positions are in; negative ones are left to be refused."""
        # Not `np.unique`, which imports numpy's masked arrays: a MiB, and some milliseconds of each start.
        for block in sorted(set((positions[positions >= 0] // BLOCK).tolist())):
            self._make_block(block)
        self.arguments = (self.pairs, address_of(self._table), address_of(self._slots), len(self._slots))

    def _make_block(self, block: int) -> None:
        if block >= len(self._slots):
            # Room for twice as many, so that decoding position by position seldom copies.
            longer = np.full(max(block + 1, 2 * len(self._slots)), -1, np.int32)
            longer[: len(self._slots)] = self._slots
            self._slots = longer
        if self._slots[block] >= 0:
            return
        if self._made == len(self._table):
            grown = np.empty((max(4, 2 * self._made), BLOCK, 2, self.pairs), np.float32)
            grown[: self._made] = self._table
            self._table = grown
        self._make(
            address_of(self._frequencies),
            self.pairs,
            self._factor & _LOW,
            self._factor >> _FACTOR_BITS,
            block * BLOCK,
            BLOCK,
            address_of(self._table[self._made]),
        )
        self._slots[block] = self._made
        self._made += 1
