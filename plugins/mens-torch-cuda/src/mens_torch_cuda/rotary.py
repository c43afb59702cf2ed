"""Rotary tables that grow in place: what was recorded over them goes on when a block of positions is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from mens_core.grid_device import Buffer, Device
from mens_core.grid_tensors import GridRotaryTable, MakeAngles
from mens_core.ops import BLOCK, Ints

if TYPE_CHECKING:
    from mens_torch_cuda.replay import Capturing

__all__ = ["RoomyRotaryTable"]

_ROOM = 64
"""Blocks that there is room for at first: 8,192 positions."""


class RoomyRotaryTable(GridRotaryTable):
    """A table on a device that can be written in place."""

    def __init__(
        self,
        device: Capturing,
        make: MakeAngles,
        frequencies: Sequence[int],
        attention_factor: tuple[int, int] | None,
    ) -> None:
        super().__init__(make, frequencies, attention_factor)
        self._capturing = device
        self._room = 0
        self._places = np.full(_ROOM, -1, np.int32)

    def reach(self, device: Device, positions: Ints) -> tuple[Buffer, Buffer]:
        """Return (table, slots) that hold these positions' blocks; the same ones while there is room."""
        fresh = sorted(set((positions // BLOCK).tolist()) - self._blocks.keys())
        for block in fresh:
            self._blocks[block] = self._make(self._frequencies, self._factor, block * BLOCK)
        if fresh or self._on_device is None:
            self._grow()
            self._write(fresh)
        if self._on_device is None:
            raise AssertionError("a table that grew has memory")
        return self._on_device

    def _grow(self) -> None:
        highest = max(self._blocks, default=0)
        if self._on_device is not None and len(self._blocks) <= self._room and highest < len(self._places):
            return
        self._room = max(_ROOM, self._room)
        while self._room < len(self._blocks):
            self._room *= 2
        known, size = self._places, len(self._places)
        while size <= highest:
            size *= 2
        self._places = np.full(size, -1, np.int32)
        self._places[: len(known)] = known
        table = self._capturing.zeros(self._room * BLOCK * 2 * self.pairs * 4)
        self._on_device = (table, self._capturing.zeros(4 * size))
        self._write(list(self._blocks))

    def _write(self, blocks: Sequence[int]) -> None:
        if self._on_device is None:
            raise AssertionError("there is no table to write to")
        table, slots = self._on_device
        nbytes = BLOCK * 2 * self.pairs * 4
        numbers = {block: slot for slot, block in enumerate(self._blocks)}
        for block in blocks:
            slot = self._places[block] = numbers[block]
            self._capturing.write(
                self._capturing.part(table, int(slot) * nbytes, nbytes), self._blocks[block]
            )
        self._capturing.write(slots, self._places)
