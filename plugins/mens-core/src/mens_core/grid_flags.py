"""Flags of rows that were not finite: many operators share a buffer, so that a step reads back once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

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

    def __init__(self, device: Device) -> None:
        self._device = device
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
            self._room = max(_SMALLEST, 2 * self._room, needed)
            self._buffers.append(self._device.zeros(4 * self._room))
            self._open, self._used = len(self._buffers) - 1, 0
        first, self._used = self._used, self._used + needed
        self._spans.append(_Span(name, self._open, first, rows))
        return self._device.part(self._buffers[self._open], 4 * first, 4 * rows)

    def adopt(self, others: RowFlags) -> None:
        """Take the calls of another set, whose buffers were zeroed and written anew, behind those so far."""
        before = len(self._buffers)
        self._spans += [span._replace(number=span.number + before) for span in others._spans]
        self._buffers += others._buffers

    def take(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first: one read per buffer."""
        faults = []
        ends: dict[int, int] = {}
        for span in self._spans:
            ends[span.number] = span.first + span.rows
        found = {
            number: self._device.get(self._device.part(self._buffers[number], 0, 4 * end), np.int32, (end,))
            for number, end in ends.items()
            if end
        }
        for span in self._spans:
            if span.rows:
                at = np.flatnonzero(found[span.number][span.first : span.first + span.rows])
                if at.size:
                    faults.append(Fault(span.name, tuple(int(row) for row in at)))
        self._spans, self._buffers, self._open, self._room, self._used = [], [], -1, 0, 0
        return faults
