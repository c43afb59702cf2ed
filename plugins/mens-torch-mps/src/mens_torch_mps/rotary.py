"""Rotary tables that grow between the commands of a step: a new block of positions waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device, Launch, constants
from mens_core.grid_tensors import GridRotaryTable, MakeAngles
from mens_core.ops import BLOCK, Ints

if TYPE_CHECKING:
    from mens_torch_mps.device import MpsDevice

__all__ = ["QueuedRotaryTable"]

_ROOM = 16
"""Blocks that there is room for at first: 2,048 positions."""
_FEW = 2
"""As many new blocks as go with the commands; more, in a long prompt's first step, are copied."""


class QueuedRotaryTable(GridRotaryTable):
    """A table with room for more blocks; one that is full is copied on the GPU into one of twice the room."""

    def __init__(
        self,
        device: MpsDevice,
        make: MakeAngles,
        frequencies: Sequence[int],
        attention_factor: tuple[int, int] | None,
    ) -> None:
        super().__init__(make, frequencies, attention_factor)
        self._memory = device
        self._room = 0

    def reach(self, device: Device, positions: Ints) -> tuple[Buffer, Buffer]:
        """Return (table, slots) that hold these positions' blocks."""
        fresh = sorted(set((positions // BLOCK).tolist()) - self._blocks.keys())
        if fresh or self._on_device is None:
            held = len(self._blocks)
            made = {block: self._make(self._frequencies, self._factor, block * BLOCK) for block in fresh}
            blocks = {**self._blocks, **made}
            table, room = self._table(blocks, held, fresh)
            self._on_device = (table, self._memory.put(_slots(blocks)))
            # Only now: where there was no room, they are new the next time too.
            self._blocks, self._room = blocks, room
        return self._on_device

    def _table(
        self, blocks: Mapping[int, npt.NDArray[np.float32]], held: int, fresh: Sequence[int]
    ) -> tuple[Buffer, int]:
        """Memory with every block, the first `held` of which are in the old one; and for how many it is."""
        nbytes = BLOCK * 2 * self.pairs * 4
        room = max(self._room, _ROOM)
        while room < len(blocks):
            room *= 2
        if len(fresh) > _FEW:
            whole = np.zeros((room, BLOCK, 2, self.pairs), np.float32)
            whole[: len(blocks)] = np.stack([*blocks.values()])
            return self._memory.put(whole), room
        old = None if self._on_device is None else self._on_device[0]
        table = old
        if table is None or room > self._room:
            table = self._memory.empty(room * nbytes)
            if old is not None and held:
                rows, width = self._memory.put(np.arange(held, dtype=np.int32)), nbytes // 4
                self._memory.launch(
                    Launch("vox_take_rows", (old, rows, table), constants(width), (width, held))
                )
        for slot, block in enumerate(fresh, held):
            words = np.ascontiguousarray(blocks[block]).reshape(-1).view(np.int32)
            self._memory.write(self._memory.part(table, slot * nbytes, nbytes), words)
        return table, room


def _slots(blocks: Mapping[int, object]) -> Ints:
    slots = np.full(max(blocks, default=0) + 1, -1, np.int32)
    slots[list(blocks)] = np.arange(len(blocks))
    return slots
