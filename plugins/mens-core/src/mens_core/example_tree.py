"""The sum over a step's examples: an aligned binary tree, whatever the micro-batches.

Leaves are the examples in the order of the step. Node (level, i) covers the leaves
[i 2^level, (i + 1) 2^level) and is left + right; where the right side holds no leaf, it is the left.
At most one partial sum per level is held, so memory grows with the logarithm of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["ExampleTree"]

T = TypeVar("T")


class ExampleTree(Generic[T]):
    """Sums leaves given in order; the caller's `add` is the only arithmetic."""

    def __init__(self, add: Callable[[T, T], T], whole: Sequence[T] = ()) -> None:
        """Begin with no leaf, or behind 2^n - 1 of them, whose n sums are `whole`, largest first."""
        self._add = add
        self._whole = list(whole)
        """Sums of whole subtrees, largest first: one per bit of the count."""
        self._count = (1 << len(self._whole)) - 1

    def push(self, leaf: T) -> None:
        """Take the next example's term."""
        self._count += 1
        node, merged = leaf, self._count
        while merged % 2 == 0:
            node = self._add(self._whole.pop(), node)
            merged //= 2
        self._whole.append(node)

    def total(self) -> T:
        """Return the root; more leaves may follow.

        Raises:
            ValueError: there is no leaf.
        """
        if not self._whole:
            raise ValueError("a step without examples has no sum")
        *left, node = self._whole
        for larger in reversed(left):
            node = self._add(larger, node)
        return node
