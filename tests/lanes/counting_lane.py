"""A numpy lane that writes down each call of an operator: its name and how many rows it had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from lanes.numpy_lane import Array, NumpyLane


class CountingLane(NumpyLane):
    def __init__(self) -> None:
        super().__init__()
        self.linears: list[tuple[str, int]] = []
        self.fused: list[tuple[str, ...]] = []

    def linear(self, x: Array, weight: Array, *, name: str) -> Array:
        self.linears.append((name, len(x)))
        return super().linear(x, weight, name=name)

    def linear_many(self, x: Array, weights: Sequence[Array], *, names: Sequence[str]) -> list[Array]:
        self.fused.append(tuple(names))
        return super().linear_many(x, weights, names=names)

    def calls_per_name(self) -> Counter[str]:
        return Counter(name for name, _ in self.linears)
