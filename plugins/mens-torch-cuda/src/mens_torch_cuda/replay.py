"""A decode step as a CUDA graph, or as several: recorded once, replayed with other inputs.

A step calls the same kernels with the same weights every time; tokens, positions and KV blocks are read
from memory. So the launches are captured over buffers that stay where they are. A step copies its inputs
there, starts the graph and waits once, for the highest tokens and the flags of rows. The operators are the
lane's own, in the same order: the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device
from mens_core.grid_flags import RowFlags
from mens_core.grid_ops import GridRotaryTable, GridTensor
from mens_core.ops import Batch, Fault, Ints, KvCache, ServedStep, rows_of_batch

__all__ = ["Capturing", "Places", "Recording", "Recordings", "padded_batch"]

MOST_ROWS = 64
"""A step of more rows is mostly arithmetic, and no step is like another."""
_MOST_RECORDINGS = 64
_ALIGNED = 4


class Capturing(Device, Protocol):
    """A device that can record launches instead of making them."""

    def capture(
        self, call: Callable[[], None], side: int = 0, piece: int = 0
    ) -> tuple[Callable[[], None], ...]:
        """Record what `call` launches and zeroes; return what makes it happen, piece by piece.

        Args:
            side: 0 or 1: what recordings of one side fetch may be read while one of the other side runs.
            piece: launches of each piece; 0: all of them are one.

        Raises:
            UnrecordableError: the call copies to or from the host.
        """
        ...

    def fetch(self, buffer: Buffer, nbytes: int) -> npt.NDArray[np.int32]:
        """Record a copy to the host, into an array that holds it after a run and `wait`."""
        ...

    def mark(self, side: int) -> None:
        """Remember, as this side's, what was launched so far."""
        ...

    def wait(self, side: int) -> None:
        """Wait for what was launched before this side's mark."""
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
    token_ids: Buffer
    logit_rows: Buffer
    whole: Buffer
    """All of them, one behind the other."""
    count: int
    """Integers in `whole`."""
    token_at: int
    """Where the first token id is in it; the first position is at 0."""

    @classmethod
    def reserve(cls, device: Device, batch: Batch) -> Places:
        """Reserve room for batches of this one's shape."""
        sizes = [_room(array.size) for array in _arrays(batch)]
        whole = device.empty(4 * sum(sizes))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [device.part(whole, 4 * at, 4 * size) for at, size in zip(starts, sizes, strict=True)]
        positions, of_rows, tables, tokens, logit_rows = parts
        return cls(positions, of_rows, tables, tokens, logit_rows, whole, sum(sizes), starts[3])

    def fill(self, device: Capturing, batch: Batch) -> None:
        """Copy a batch there."""
        arrays = _arrays(batch)
        out = np.zeros(sum(_room(array.size) for array in arrays), np.int32)
        at = 0
        for array in arrays:
            out[at : at + array.size] = array.reshape(-1)
            at += _room(array.size)
        device.write(self.whole, out)

    def write_tables(self, device: Capturing, batch: Batch) -> None:
        """Copy a batch's block tables there, and nothing else."""
        tables = batch.block_tables.reshape(-1)
        device.write(self.block_tables, np.concatenate([tables, np.zeros(-len(tables) % _ALIGNED, np.int32)]))


def _arrays(batch: Batch) -> tuple[Ints, ...]:
    """In the order of the fields of `Places`."""
    sequences = np.repeat(np.arange(len(batch.block_tables), dtype=np.int32), np.diff(batch.starts))
    return batch.positions, sequences, batch.block_tables, batch.token_ids, batch.logit_rows


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A model's step over one cache, for one shape of batch."""

    step: ServedStep
    cache: KvCache
    side: int
    """Of two recordings of one step, one may run while the other's results are read."""
    places: Places
    next_places: Places
    """Of the other side. A run leaves there what comes next, if that is the highest token of each row
    (foresight.py)."""
    vocabulary: int
    """Token ids are below it."""
    logits: GridTensor | None
    """The result, until the next run."""
    highest: npt.NDArray[np.int32] | None
    """The token of each row's highest logit, after a run."""
    flags: tuple[npt.NDArray[np.int32], ...]
    """Flags of rows that were not finite, after a run; buffer by buffer."""
    spans: RowFlags
    """Whose flags they are."""
    of_hidden: int
    """So many operators came before rows were taken."""
    tables: tuple[tuple[GridRotaryTable, tuple[Buffer, Buffer]], ...]
    """Rotary tables, and where they were when this was recorded."""
    pieces: tuple[Callable[[], None], ...]
    """What makes it happen, one after the other."""
    kept: Any
    """Memory that kernels use between them, held as long as this."""

    def is_current(self, device: Device, positions: Ints, cache: KvCache) -> bool:
        """Whether it reads this cache, and rotary tables that hold these positions where they were."""
        return cache is self.cache and all(
            table.reach(device, positions) is place for table, place in self.tables
        )

    def begin(self, device: Capturing, batch: Batch) -> None:
        """Start the step on this batch."""
        self.places.fill(device, batch)
        self.go_on(device)

    def go_on(self, device: Capturing, first: int = 0, end: int | None = None) -> None:
        """Start some of its pieces, all by default, on what lies in its places."""
        if first < len(self.pieces):
            for piece in self.pieces[first:end]:
                piece()
            device.mark(self.side)

    def end(self, device: Capturing, batch: Batch) -> list[Fault]:
        """Wait for the step; return faults by the batch's rows."""
        device.wait(self.side)
        if not any(flags.any() for flags in self.flags):
            return []
        hidden, head = self.spans.read(self.flags, self.of_hidden)
        return hidden + rows_of_batch(head, batch)


class Recordings:
    """Recordings by what they are good for; the one used longest ago goes first."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], Recording] = OrderedDict()
        self._seen: OrderedDict[tuple[Any, ...], int] = OrderedDict()
        """How often it was asked for, before it was recorded."""
        self._refused: set[tuple[Any, ...]] = set()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, key: tuple[Any, ...]) -> Recording | None:
        """Return the recording of this key."""
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def is_worth_it(self, key: tuple[Any, ...], *, times: int = 2) -> bool:
        """Whether to record: from so many times on; from the second, as most shapes of prefill come once."""
        if key in self._refused:
            return False
        seen = self._seen.pop(key, 0) + 1
        if key in self._kept or seen >= times:
            return True
        self._seen[key] = seen
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
    # A power of two: a sequence that grows seldom needs another recording, and few groups find no block.
    wide = 1 << (width - 1).bit_length()
    tables = np.full((sequences, wide), -1, np.int32)
    tables[:, :width] = batch.block_tables
    return replace(batch, block_tables=tables)


def _room(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED
