"""What of a layer's forward is remembered until its backward, instead of made a second time. Pure.

The forward that looks for the loss keeps each layer's input; on the way back the layer runs again. What is
remembered of the first run is taken over by the second: the same tensors, so no bit depends on the choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mens_core.models.linear import Linear

__all__ = ["Part", "Remembered", "choose_parts", "part_bytes", "part_of"]

_FLOAT = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Outputs that are remembered together or not at all."""

    names: frozenset[str]
    """Of the operators that make them."""
    floats: int
    """Of each row."""
    terms: int
    """Of the sum that each of them is, or as many as take as long: what it is worth for its bytes."""


class Remembered:
    """Outputs of one layer, by the names of what made them."""

    __slots__ = ("_held", "_names")

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: whose outputs are remembered; all others are let go."""
        self._names = names
        self._held: dict[str, Any] = {}

    def wants(self, name: str) -> bool:
        """Whether outputs of that name are remembered."""
        return name in self._names

    def note(self, name: str, made: Any, *, of: str | None = None) -> None:
        """Hold what was made, if it is one of the names; what belongs to another goes by the name `of` it."""
        if self.wants(of or name):
            self._held[name] = made

    def recall(self, name: str) -> Any | None:
        """Return what was made under the name, if it is held."""
        return self._held.get(name)


def part_of(*linears: Linear) -> Part:
    """Outputs of linear layers with one number of inputs, and the thin ones of their updates."""
    floats = sum(linear.shape[0] + (linear.lora.rank if linear.lora else 0) for linear in linears)
    return Part(frozenset(linear.name for linear in linears), floats, linears[0].shape[1])


def part_bytes(part: Part, rows: int) -> int:
    """What a part of so many rows takes."""
    return _FLOAT * part.floats * rows


def choose_parts(
    layers: Sequence[Sequence[Part]], rows: int, room_bytes: int
) -> tuple[list[frozenset[str]], int]:
    """Return what each layer remembers of `rows` rows, and the bytes of all of it: `room_bytes` at most.

    Args:
        layers: the parts of each layer; those come first that are worth most for their bytes.
    """
    names: list[frozenset[str]] = [frozenset()] * len(layers)
    taken = 0
    # The last layers first: their backward comes first, and theirs are let go first.
    every = [(index, part) for index, parts in reversed(list(enumerate(layers))) for part in parts]
    for index, part in sorted(every, key=lambda one: -one[1].terms):
        if taken + part_bytes(part, rows) <= room_bytes:
            taken += part_bytes(part, rows)
            names[index] |= part.names
    return names, taken
