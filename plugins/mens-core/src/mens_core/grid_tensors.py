"""What the grid operators work on: arrays of a device, the KV cache, tables of angles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device
from mens_core.ops import BLOCK, Ints

__all__ = [
    "GridExamples",
    "GridKvCache",
    "GridParts",
    "GridRotaryTable",
    "GridTensor",
    "MakeAngles",
    "VALUE_STRIDE",
]

MakeAngles = Callable[[npt.NDArray[np.uint64], int, int], npt.NDArray[np.float32]]
"""Cosines and sines [128, 2, pairs] of a block of positions, natively (docs/numerics.md, 7), from
frequencies [pairs, 2] (low and high half), the multiplier M and the block's first position."""

VALUE_STRIDE = 16
"""The cache's values have a multiple of this many floats a position."""
_FACTOR_BITS = 64


@dataclass(frozen=True, slots=True, eq=False)
class GridTensor:
    """A float32 array of a device."""

    buffer: Buffer
    shape: tuple[int, ...]


class GridParts(list[GridTensor]):
    """Tensors one behind the other in memory, each from a multiple of 16 floats on; +0 between them."""

    def __init__(self, parts: Sequence[GridTensor], whole: GridTensor) -> None:
        """`whole`: all of it, as [quads, 4]."""
        super().__init__(parts)
        self.whole = whole


class GridExamples(list[GridTensor]):
    """Tensors of one shape, one per example, whose buffer holds them `stride` floats apart."""

    def __init__(self, tensors: Sequence[GridTensor], whole: Buffer, stride: int, first: int = 0) -> None:
        """`first`: which of those in `whole` the first one is."""
        super().__init__(tensors)
        self.whole, self.stride, self.first = whole, stride, first

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        begin, _, step = index.indices(len(self))
        if step != 1:
            raise ValueError("neighbours alone are examples of one buffer")
        return GridExamples(super().__getitem__(index), self.whole, self.stride, self.first + begin)


@dataclass(frozen=True, slots=True, eq=False)
class GridKvCache:
    """Per layer: keys [blocks, kv_heads, head_dim, 128], values [blocks, kv_heads, 128, stride]."""

    kv_heads: int
    head_dim: int
    stride: int
    keys: tuple[Buffer, ...]
    values: tuple[Buffer, ...]


class GridRotaryTable:
    """Blocks of 128 positions met so far, made on the host and copied as they are reached."""

    def __init__(
        self, make: MakeAngles, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> None:
        numerator, denominator = attention_factor or (1, 1)
        self._make = make
        self._factor = (numerator << _FACTOR_BITS) // denominator
        low = (1 << 64) - 1
        self._frequencies = np.array([[f & low, f >> 64] for f in frequencies], np.uint64)
        self.pairs = len(frequencies)
        self._blocks: dict[int, npt.NDArray[np.float32]] = {}
        self._on_device: tuple[Buffer, Buffer] | None = None

    def reach(self, device: Device, positions: Ints) -> tuple[Buffer, Buffer]:
        """Return (table, slots) that hold the blocks of these positions."""
        wanted = set((positions // BLOCK).tolist()) - self._blocks.keys()
        for block in sorted(wanted):
            self._blocks[block] = self._make(self._frequencies, self._factor, block * BLOCK)
        if wanted or self._on_device is None:
            slots = np.full(max(self._blocks) + 1, -1, np.int32)
            for slot, block in enumerate(self._blocks):
                slots[block] = slot
            table = np.stack([*self._blocks.values()])
            self._on_device = (device.put(table), device.put(slots))
        return self._on_device
