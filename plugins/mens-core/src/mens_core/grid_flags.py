"""Flags of rows that were not finite: many operators share a buffer, so that a step reads back once."""

from __future__ import annotations

import numpy as np

from mens_core.grid_device import Buffer, Device
from mens_core.ops import Fault

__all__ = ["RowFlags"]

_ALIGNED = 4
"""Flags between the starts of two operators' parts are a multiple of this: 16 bytes."""
_SMALLEST = 4096


class RowFlags:
    """An int32 per row and operator, zeroed in advance; a kernel sets it where a value is not finite."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: list[tuple[str, int, int, int]] = []
        """Operator, buffer, first flag, rows; in the order of the calls."""
        self._buffers: list[Buffer] = []
        self._room = 0
        self._used = 0

    def reserve(self, name: str, rows: int) -> Buffer:
        """Return the flags [rows] of one operator's call, all zero."""
        needed = -(-rows // _ALIGNED) * _ALIGNED
        if self._used + needed > self._room:
            self._room = max(_SMALLEST, 2 * self._room, needed)
            self._buffers.append(self._device.zeros(4 * self._room))
            self._used = 0
        first, self._used = self._used, self._used + needed
        self._spans.append((name, len(self._buffers) - 1, first, rows))
        return self._device.part(self._buffers[-1], 4 * first, 4 * rows)

    def take(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first: one read per buffer."""
        faults = []
        ends: dict[int, int] = {}
        for _, number, first, rows in self._spans:
            ends[number] = first + rows
        found = {
            number: self._device.get(self._device.part(self._buffers[number], 0, 4 * end), np.int32, (end,))
            for number, end in ends.items()
            if end
        }
        for name, number, first, rows in self._spans:
            if rows:
                at = np.flatnonzero(found[number][first : first + rows])
                if at.size:
                    faults.append(Fault(name, tuple(int(row) for row in at)))
        self._spans, self._buffers, self._room, self._used = [], [], 0, 0
        return faults
