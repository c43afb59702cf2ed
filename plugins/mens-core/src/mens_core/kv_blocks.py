"""Which sequence owns which KV block.

A pool of numbered blocks, each 128 positions in every layer. A sequence reserves as many as it
can ever need when it is admitted, so a running sequence never waits for a block and nothing
has to be taken back from anyone: waiting happens before admission only, and can't deadlock.
The numbers themselves are handed out when positions are written, lowest first, so memory that
no sequence has reached stays untouched.
"""

from __future__ import annotations

import heapq

from mens_core.ops import BLOCK

__all__ = ["BlockPool", "Reservation", "blocks_for"]


def blocks_for(positions: int) -> int:
    """Return how many blocks hold this many positions."""
    return -(-positions // BLOCK)


class BlockPool:
    """`total` blocks, numbered from 0."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.reserved = 0
        self.peak_used = 0
        """The most blocks ever held at once; higher numbers were never touched."""
        self._free = list(range(total))

    @property
    def used(self) -> int:
        """Blocks that hold positions now."""
        return self.total - len(self._free)

    def can_reserve(self, blocks: int) -> bool:
        """Whether that many are promised to nobody."""
        return self.reserved + blocks <= self.total

    def reserve(self, blocks: int) -> Reservation:
        """Promise blocks to a sequence.

        Raises:
            ValueError: more than are left; ask `can_reserve` first.
        """
        if not self.can_reserve(blocks):
            raise ValueError(
                f"{blocks} blocks wanted, {self.total - self.reserved} of {self.total} unreserved"
            )
        self.reserved += blocks
        return Reservation(self, blocks)

    def _take(self) -> int:
        block = heapq.heappop(self._free)
        self.peak_used = max(self.peak_used, self.used)
        return block

    def _give_back(self, table: list[int], reserved: int) -> None:
        for block in table:
            heapq.heappush(self._free, block)
        self.reserved -= reserved


class Reservation:
    """One sequence's share of a pool."""

    def __init__(self, pool: BlockPool, blocks: int) -> None:
        self._pool = pool
        self._reserved = blocks
        self.table: list[int] = []
        """The block of each 128 positions so far."""

    def grow_to(self, positions: int) -> None:
        """Take blocks until `positions` fit.

        Raises:
            ValueError: the reservation was for fewer.
        """
        if blocks_for(positions) > self._reserved:
            raise ValueError(f"{positions} positions need more than the {self._reserved} blocks reserved")
        while len(self.table) < blocks_for(positions):
            self.table.append(self._pool._take())

    def release(self) -> None:
        """Give everything back; a second call does nothing."""
        self._pool._give_back(self.table, self._reserved)
        self.table, self._reserved = [], 0
