"""Runs a model's layers as one recording, and knows when they must be called one by one instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mens_core.ops import Batch, ServedLayer
from mens_cpu_ref.arrays import AddressCache, Rows, address_of, huge_zeros, new_rows
from mens_cpu_ref.layer_recording import Recording, UnrecordableError, record
from mens_cpu_ref.library import Function
from mens_cpu_ref.matrices import KvCache

__all__ = ["Replayer"]

_OUT_OF_RANGE = -2
_ALIGNMENT = 64
_SIZES_KEPT = 64


_MAPPED_BYTES = 1 << 20
"""From here on a step's memory is mapped, in huge pages, since each row of a product's output lies in another
small one, more of them than a core keeps addresses of. A smaller step gives it back to the system."""


class Replayer:
    """The recording of the layers that were run last, and the memory of a step."""

    def __init__(self, functions: Mapping[str, Function], index: AddressCache) -> None:
        self._replay = functions["replay"]
        self._activation_bytes = functions["quant_activation_bytes"]
        self._index = index
        self._of: tuple[Sequence[ServedLayer], KvCache, int] | None = None
        self._recording: Recording | None = None
        self._sizes: dict[int, tuple[npt.NDArray[np.int64], int]] = {}
        self._mapped: npt.NDArray[np.uint8] | None = None

    def run(self, x: Rows, layers: Sequence[ServedLayer], batch: Batch, cache: KvCache) -> Rows | None:
        """Return [N, D], or None: nothing was done that counts, and the operators must be called one by one.

        That is so for layers that can't be recorded, and where an operator objects or makes a
        value that is not finite: called one by one, they say which operator and which rows.
        The cache may hold the step's keys and values; they are the ones that will be written again.
        """
        recording = self._recorded(x, layers, batch, cache)
        rows = len(batch.positions)
        if recording is None or rows == 0:
            return None
        out = new_rows(rows, x.values.shape[1])
        offsets, size = self._sized(recording, rows)
        memory = self._memory(size)
        buffers = offsets + (-(-address_of(memory) // _ALIGNMENT) * _ALIGNMENT)
        buffers[0], buffers[1] = x.address, out.address
        code = self._call(recording, buffers, rows, batch, cache)
        if code == _OUT_OF_RANGE:
            # Some block of a rotary table is not made yet: only now are the positions worth a look.
            for table in recording.tables:
                table.reach(batch.positions)
            code = self._call(recording, buffers, rows, batch, cache)
        return out if code == 0 else None

    def _memory(self, size: int) -> npt.NDArray[np.uint8]:
        """Return at least `size` bytes of whatever was there; the steps of a prompt have the same ones."""
        if size < _MAPPED_BYTES:
            self._mapped = None
            return np.empty(size, np.uint8)
        if self._mapped is None or self._mapped.size < size:
            self._mapped = huge_zeros(size)
        return self._mapped

    def _recorded(
        self, x: Rows, layers: Sequence[ServedLayer], batch: Batch, cache: KvCache
    ) -> Recording | None:
        width = x.values.shape[1]
        of = self._of
        if of is None or of[0] is not layers or of[1] is not cache or of[2] != width:
            try:
                self._recording = record(layers, batch, cache, width)
            except UnrecordableError:
                self._recording = None
            self._of = (layers, cache, width)
            self._sizes.clear()
        return self._recording

    def _sized(self, recording: Recording, rows: int) -> tuple[npt.NDArray[np.int64], int]:
        """Where each buffer of a step of `rows` rows begins, and how much memory they need."""
        known = self._sizes.get(rows)
        if known is None:
            if len(self._sizes) >= _SIZES_KEPT:
                self._sizes.clear()
            ends = [0, 0, 0]
            for width, block in recording.slots:
                size = self._activation_bytes(block, rows, width) if block else 4 * rows * width
                ends.append(ends[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
            known = self._sizes[rows] = (np.array(ends[:-1], np.int64), ends[-1] + _ALIGNMENT)
        return known

    def _call(
        self, recording: Recording, buffers: npt.NDArray[np.int64], rows: int, batch: Batch, cache: KvCache
    ) -> int:
        recording.take_tables()
        index = self._index
        sequences, blocks_per_sequence = batch.block_tables.shape
        return self._replay(
            address_of(recording.operations),
            len(recording.operations),
            address_of(buffers),
            rows,
            index(batch.positions),
            index(batch.starts),
            index(batch.block_tables),
            sequences,
            blocks_per_sequence,
            cache.blocks,
        )
