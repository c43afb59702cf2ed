"""The sum over a step's examples: an aligned binary tree, whatever the micro-batches and the GPUs.

Leaves are the examples in the order of the step. Node (level, i) covers the leaves
[i 2^level, (i + 1) 2^level) and is left + right; where the right side holds no leaf, it is the left.
A tree may be given a run of neighbours only: it then holds the nodes that lie wholly in that run, and
the tree over all takes them as they are. At most two partial sums per level are held, and one by a tree
that begins at the first leaf, so memory grows with the logarithm of the examples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

__all__ = ["ExampleTree"]

T = TypeVar("T")


class ExampleTree(Generic[T]):
    """Sums leaves given in order; the caller's `add` is the only arithmetic."""

    def __init__(self, add: Callable[[T, T], T], whole: Sequence[T] = (), *, first: int = 0) -> None:
        """Begin with no leaf, or behind 2^n - 1 of them, whose n sums are `whole`, largest first.

        Args:
            first: number of the first leaf that will be pushed, where it isn't 0.
        """
        self._add = add
        self._nodes = [(len(whole) - 1 - i, node) for i, node in enumerate(whole)]
        """Level and sum of each whole subtree, from left to right."""
        self._first = first
        self._next = first + (1 << len(whole)) - 1

    def push(self, node: T, level: int = 0) -> None:
        """Take the next example's term, or the sum of the next 2^level ones.

        Raises:
            ValueError: no node of that level begins there.
        """
        start = self._next
        if start % (1 << level):
            raise ValueError(f"example {start} begins no node of level {level}")
        self._next += 1 << level
        while self._nodes and self._nodes[-1][0] == level and (start >> level) % 2:
            node = self._add(self._nodes.pop()[1], node)
            start -= 1 << level
            level += 1
        self._nodes.append((level, node))

    def runs(self, count: int, most: int) -> list[int]:
        """Return how to cut the next `count` leaves into the fewest nodes of at most `most` leaves, 2^n."""
        sizes, at = [], self._next
        while count:
            size = min(most, 1 << (count.bit_length() - 1), at & -at or most)
            sizes.append(size)
            at, count = at + size, count - size
        return sizes

    def nodes(self) -> list[tuple[int, T]]:
        """Return level and sum of the fewest whole subtrees that cover the leaves so far, in order."""
        return list(self._nodes)

    def total(self) -> T:
        """Return the root; more leaves may follow.

        Raises:
            ValueError: there is no leaf, or the first ones are another's.
        """
        if not self._nodes:
            raise ValueError("a step without examples has no sum")
        if self._first:
            raise ValueError(f"the sum over a step begins with its first example, not with {self._first}")
        *left, (_, node) = self._nodes
        for _, larger in reversed(left):
            node = self._add(larger, node)
        return node
