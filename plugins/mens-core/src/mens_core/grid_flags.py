"""Flags of rows that were not finite: many operators share a buffer, so that a step reads back once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device
from mens_core.ops import Fault

__all__ = ["RowFlags"]

_ALIGNED = 4
"""Flags between the starts of two operators' parts are a multiple of this: 16 bytes."""
_SMALLEST = 4096


class _Span(NamedTuple):
    """Where one operator's call has its flags."""

    name: str
    number: int
    """Of the buffer."""
    first: int
    rows: int


class RowFlags:
    """An int32 per row and operator, zeroed in advance; a kernel sets it where a value is not finite."""

    def __init__(self, device: Device, room: int = _SMALLEST) -> None:
        """`room`: for so many flags a buffer is zeroed at first."""
        self._device = device
        self._smallest = room
        self._spans: list[_Span] = []
        self._buffers: list[Buffer] = []
        self._open = -1
        """The buffer that has room, if any."""
        self._room = 0
        self._used = 0

    def reserve(self, name: str, rows: int) -> Buffer:
        """Return the flags [rows] of one operator's call, all zero."""
        needed = -(-rows // _ALIGNED) * _ALIGNED
        if self._used + needed > self._room:
            self._room = max(self._smallest, 2 * self._room, needed)
            self._buffers.append(self._device.zeros(4 * self._room))
            self._open, self._used = len(self._buffers) - 1, 0
        first, self._used = self._used, self._used + needed
        self._spans.append(_Span(name, self._open, first, rows))
        return self._device.part(self._buffers[self._open], 4 * first, 4 * rows)

    def reserve_together(self, parts: Sequence[tuple[str, int]]) -> Buffer:
        """Return the flags of several calls, one behind the other; each has a multiple of four."""
        total = sum(rows for _, rows in parts)
        if any(rows % _ALIGNED for _, rows in parts):
            raise ValueError("flags of calls that stand together are in fours")
        first_name, _ = parts[0]
        whole = self.reserve(first_name, total)
        span = self._spans.pop()
        at = span.first
        for name, rows in parts:
            self._spans.append(_Span(name, span.number, at, rows))
            at += rows
        return whole

    @property
    def calls(self) -> int:
        """How many calls reserved flags."""
        return len(self._spans)

    def parts(self) -> list[tuple[Buffer, int]]:
        """Return each buffer and how many of its flags are in use."""
        ends = self._ends()
        return [(self._buffers[number], end) for number, end in sorted(ends.items()) if end]

    def take(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first: one read per buffer."""
        get, part = self._device.get, self._device.part
        found = [get(part(buffer, 0, 4 * end), np.int32, (end,)) for buffer, end in self.parts()]
        (faults,) = self.read(found)
        self.forget()
        return faults

    def forget(self) -> None:
        """Go on as after `take`, of flags that are known to be zero."""
        self._spans, self._buffers, self._open, self._room, self._used = [], [], -1, 0, 0

    def read(self, found: Sequence[npt.NDArray[np.int32]], *bounds: int) -> tuple[list[Fault], ...]:
        """Return what `found`, the flags of `parts`, says of the calls before each bound and of the rest."""
        used = [number for number, end in sorted(self._ends().items()) if end]
        by_number = dict(zip(used, found, strict=True))
        faults: tuple[list[Fault], ...] = tuple([] for _ in range(len(bounds) + 1))
        for i, span in enumerate(self._spans):
            if span.rows:
                at = np.flatnonzero(by_number[span.number][span.first : span.first + span.rows])
                if at.size:
                    rows = tuple(int(row) for row in at)
                    faults[sum(i >= bound for bound in bounds)].append(Fault(span.name, rows))
        return faults

    def _ends(self) -> dict[int, int]:
        return {span.number: span.first + span.rows for span in self._spans}
