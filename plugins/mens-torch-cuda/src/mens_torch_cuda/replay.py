"""A decode step's layers as one CUDA graph: recorded once, replayed with other inputs.

The layers call the same kernels with the same weights in every step; rows, positions and KV blocks are read
from memory. So the launches are captured over buffers that stay where they are, and a step copies its inputs
there and starts the graph. The operators are the lane's own, in the same order: the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device
from mens_core.grid_flags import RowFlags
from mens_core.grid_ops import GridRotaryTable, GridTensor
from mens_core.ops import Batch, Ints, KvCache, ServedLayer

__all__ = ["Capturing", "Places", "Recording", "Recordings", "UnrecordableError", "padded_batch"]

MOST_ROWS = 64
"""A step of more rows is mostly arithmetic, and no step is like another."""
_MOST_RECORDINGS = 64
_TABLE_STEP = 16
"""Block tables are as wide as a multiple of this: a sequence that grows seldom needs another recording."""
_ALIGNED = 4


class UnrecordableError(Exception):
    """The layers ask for something whose place or value is another one in every step."""


class Capturing(Device, Protocol):
    """A device that can record launches instead of making them."""

    def capture(self, call: Callable[[], GridTensor]) -> tuple[GridTensor, Callable[[], None]]:
        """Record what `call` launches and zeroes; return its result and what makes it happen.

        Raises:
            UnrecordableError: the call copies to or from the host.
        """
        ...

    def copy(self, target: Buffer, source: Buffer) -> None:
        """Copy a buffer onto another of the same size."""
        ...

    def write(self, target: Buffer, array: npt.NDArray[Any]) -> None:
        """Copy an array onto a buffer of its size."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where a recording reads what a step's rows are."""

    positions: Buffer
    sequences: Buffer
    block_tables: Buffer
    whole: Buffer
    """All three, one behind the other."""

    @classmethod
    def reserve(cls, device: Device, batch: Batch) -> Places:
        """Reserve room for batches of this one's shape."""
        sizes = [_room(len(batch.positions))] * 2 + [_room(batch.block_tables.size)]
        whole = device.empty(4 * sum(sizes))
        starts = [0, sizes[0], sizes[0] + sizes[1]]
        positions, sequences, tables = (
            device.part(whole, 4 * at, 4 * size) for at, size in zip(starts, sizes, strict=True)
        )
        return cls(positions, sequences, tables, whole)

    def fill(self, device: Capturing, batch: Batch) -> None:
        """Copy a batch there."""
        rows, tables = len(batch.positions), batch.block_tables
        out = np.zeros(2 * _room(rows) + _room(tables.size), np.int32)
        out[:rows] = batch.positions
        out[_room(rows) : _room(rows) + rows] = np.repeat(np.arange(len(tables)), np.diff(batch.starts))
        out[2 * _room(rows) : 2 * _room(rows) + tables.size] = tables.reshape(-1)
        device.write(self.whole, out)


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """The layers of a model over one cache, for one shape of batch."""

    layers: Sequence[ServedLayer]
    cache: KvCache
    x: GridTensor
    places: Places
    out: GridTensor
    flags: RowFlags
    tables: tuple[tuple[GridRotaryTable, tuple[Buffer, Buffer]], ...]
    """Rotary tables, and where they were when this was recorded."""
    start: Callable[[], None]

    def is_current(self, device: Device, positions: Ints, cache: KvCache) -> bool:
        """Whether it reads this cache, and rotary tables that hold these positions where they were."""
        return cache is self.cache and all(
            table.reach(device, positions) is place for table, place in self.tables
        )

    def run(self, device: Capturing, x: GridTensor, batch: Batch) -> GridTensor:
        """Run the layers on these rows; the result stays until the next run."""
        device.copy(self.x.buffer, x.buffer)
        self.places.fill(device, batch)
        self.start()
        return self.out


class Recordings:
    """Recordings by what they are good for; the one used longest ago goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], Recording] = OrderedDict()
        self._seen: OrderedDict[tuple[Any, ...], None] = OrderedDict()
        self._refused: set[tuple[Any, ...]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: tuple[Any, ...]) -> Recording | None:
        """Return the recording of this key."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def is_worth_it(self, key: tuple[Any, ...]) -> bool:
        """Whether to record: from the second time on, as most shapes of prefill come once."""
        if key in self._refused:
            return False
        if key in self._kept or key in self._seen:
            return True
        self._seen[key] = None
        while len(self._seen) > _MOST_RECORDINGS:
            self._seen.popitem(last=False)
        return False

    def keep(self, key: tuple[Any, ...], recording: Recording) -> None:
        """Keep a recording."""
        self._kept[key] = recording
        while len(self._kept) > _MOST_RECORDINGS:
            self._kept.popitem(last=False)

    def refuse(self, key: tuple[Any, ...]) -> None:
        """Never try this key again."""
        self._refused.add(key)
        self._kept.pop(key, None)


def padded_batch(batch: Batch) -> Batch:
    """The same batch with block tables of a width that many batches share."""
    sequences, width = batch.block_tables.shape
    wide = -(-width // _TABLE_STEP) * _TABLE_STEP
    tables = np.full((sequences, wide), -1, np.int32)
    tables[:, :width] = batch.block_tables
    return replace(batch, block_tables=tables)


def _room(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
