"""Which examples of a step each device computes. Pure: no bit depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

__all__ = ["shares"]


def shares(rows: Sequence[int], ranks: int) -> list[range]:
    """Cut a step into `ranks` runs of neighbours with about as many rows each; the first one is never empty.

    Args:
        rows: of each example, above 0.
    """
    before = [0, *accumulate(rows)]
    cuts = [
        next(i for i, count in enumerate(before) if count * ranks >= before[-1] * rank)
        for rank in range(ranks + 1)
    ]
    return [range(begin, end) for begin, end in pairwise(cuts)]
