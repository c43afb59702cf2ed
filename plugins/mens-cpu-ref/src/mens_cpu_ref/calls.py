"""Operators on their way into a recording: what each reads and writes, and where that lies.

Values get buffers, which are used again once a value was read for the last time; operators get
groups, within which they may run at once. Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mens_cpu_ref.rotary import RotaryTable

__all__ = [
    "ADD",
    "ADD_SCALED",
    "ATTENTION",
    "GELU_GATE",
    "KV_APPEND",
    "LINEAR",
    "NORM",
    "QUANT_ACTIVATIONS",
    "QUANT_LINEAR",
    "ROPE",
    "SILU_GATE",
    "Call",
    "Groups",
    "Value",
    "assign_buffers",
]

# Kinds of native/abi.h.
NORM, ROPE, KV_APPEND, ATTENTION, ADD = 0, 1, 2, 3, 4
SILU_GATE, GELU_GATE, LINEAR, QUANT_ACTIVATIONS, QUANT_LINEAR, ADD_SCALED = 5, 6, 7, 8, 9, 10
_IN_PLACE = frozenset({NORM, ROPE, ADD, ADD_SCALED, SILU_GATE, GELU_GATE})
"""What reads an element of its argument for the last time before it writes that element."""

_INPUT, _OUTPUT = 0, 1
"""Buffers that the caller brings."""


@dataclass(frozen=True, slots=True)
class Value:
    """What an operator will have made: rows of `width` floats, or their codes in blocks of `block`."""

    number: int
    width: int
    block: int = 0


@dataclass(slots=True)
class Call:
    kind: int
    x: Value
    y: Value | None
    out: Value | None
    arguments: tuple[int, ...]
    table: RotaryTable | None = None
    layer: int | None = None
    """Whose cache is written (`kv_append`) or read (`attention`)."""


class Groups:
    """Which operators may run at once: none writes what another of the group reads or writes."""

    def __init__(self) -> None:
        self._read: set[object] = set()
        self._written: set[object] = set()

    def takes(self, call: Call, x: int, y: int, out: int) -> bool:
        """Whether the call belongs to the group so far; else it begins the next one."""
        reads: set[object] = {buffer for buffer in (x, y) if buffer >= 0}
        writes: set[object] = {buffer for buffer in (out,) if buffer >= 0}
        if call.layer is not None:
            (writes if call.kind == KV_APPEND else reads).add(("cache", call.layer))
        joins = not (reads & self._written or writes & (self._read | self._written))
        if not joins:
            self._read, self._written = set(), set()
        self._read |= reads
        self._written |= writes
        return joins


def assign_buffers(calls: Sequence[Call], result: Value) -> tuple[dict[int, int], list[tuple[int, int]]]:
    """Buffer of each value, and what the buffers hold; a buffer is used again after its last reading."""
    last: dict[int, int] = {}
    for i, call in enumerate(calls):
        for value in (call.x, call.y):
            if value is not None:
                last[value.number] = i
    buffers = {0: _INPUT}
    slots: list[tuple[int, int]] = []
    free: dict[tuple[int, int], list[int]] = {}
    for i, call in enumerate(calls):
        ends = [
            v
            for v in {call.x, call.y}
            if v is not None and last[v.number] == i and buffers[v.number] > _OUTPUT
        ]
        if call.kind in _IN_PLACE:
            _release(ends, buffers, free)
        if call.out is not None:
            kind = (call.out.width, call.out.block)
            if call.out.number == result.number:
                buffers[call.out.number] = _OUTPUT
            elif free.get(kind):
                buffers[call.out.number] = free[kind].pop()
            else:
                slots.append(kind)
                buffers[call.out.number] = _OUTPUT + len(slots)
        if call.kind not in _IN_PLACE:
            _release(ends, buffers, free)
    return buffers, slots


def _release(
    values: Sequence[Value], buffers: dict[int, int], free: dict[tuple[int, int], list[int]]
) -> None:
    for value in values:
        free.setdefault((value.width, value.block), []).append(buffers[value.number])
