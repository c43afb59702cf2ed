"""Which sequences hold which KV block.

A pool of numbered blocks, each 128 positions in every layer. A sequence reserves as many as it
can ever need when it is admitted, so a running sequence never waits for a block and nothing
has to be taken back from anyone: waiting happens before admission only, and can't deadlock.
The numbers themselves are handed out when positions are written, lowest first, so memory that
no sequence has reached stays untouched.

A block whose 128 positions are all written never changes again. Sequences that begin with the same
tokens hold it together, and when the last of them lets go it is kept for those to come, until its
place is needed: the oldest goes first, of one sequence the last. So a block is never kept without the
ones before it, and what is kept stands in nobody's way.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Sequence

from mens_core.ops import BLOCK
from mens_core.prefix_index import PrefixIndex, WholeBlock

__all__ = ["BlockPool", "Reservation", "blocks_for"]


def blocks_for(positions: int) -> int:
    """Return how many blocks hold this many positions."""
    return -(-positions // BLOCK)


class BlockPool:
    """`total` blocks, numbered from 0."""

    def __init__(self, total: int, *, taken_freely: int | None = None) -> None:
        """Nothing is touched.

        Args:
            taken_freely: how many blocks may have been touched before kept ones are given up rather
                than new ones touched; None: all, where their memory is taken already.
        """
        self.total = total
        self.used = 0
        """Blocks that sequences hold; one that several hold counts once."""
        self.promised = 0
        """Blocks that sequences may still take."""
        self.touched = 0
        """The most blocks ever held or kept at once; higher numbers were never written to."""
        self.changes = 0
        """Counts what may let somebody in who was not let in before."""
        self.index = PrefixIndex()
        self.taken_freely = total if taken_freely is None else taken_freely
        self._free = list(range(total))
        self._holders = [0] * total
        self._whole: dict[int, WholeBlock] = {}
        self._kept: OrderedDict[int, WholeBlock] = OrderedDict()

    @property
    def reserved(self) -> int:
        """Blocks that are held or promised: what others can't have."""
        return self.used + self.promised

    @property
    def kept(self) -> int:
        """Blocks that nobody holds and whose content may still be of use."""
        return len(self._kept)

    def find_prefix(
        self, origin: str, token_ids: Sequence[int], positions: int, behind: Sequence[WholeBlock] = ()
    ) -> list[WholeBlock]:
        """Return the whole blocks that hold `token_ids` from the start, as far as there are any.

        Args:
            positions: how many of the ids may be looked for.
            behind: the blocks of the first of them, which are left out of the result.
        """
        chain = list(behind)
        while (len(chain) + 1) * BLOCK <= positions:
            first = len(chain) * BLOCK
            before = chain[-1] if chain else None
            found = self.index.find(origin, before, token_ids[first : first + BLOCK])
            if found is None:
                break
            chain.append(found)
        return chain[len(behind) :]

    @property
    def idle(self) -> int:
        """Blocks that were written to, and that nobody holds or has use for."""
        return self.touched - self.used - self.kept

    def reserved_with(self, blocks: int, prefix: Sequence[WholeBlock] = ()) -> int:
        """Return what would be reserved beside a sequence of `blocks`; what others hold counts once."""
        return self.reserved + blocks - sum(self._holders[whole.number] > 0 for whole in prefix)

    def can_reserve(self, blocks: int, prefix: Sequence[WholeBlock] = ()) -> bool:
        """Whether that many are there for a sequence that begins with `prefix`."""
        return self.reserved_with(blocks, prefix) <= self.total

    def reserve(self, blocks: int, prefix: Sequence[WholeBlock] = ()) -> Reservation:
        """Promise blocks to a sequence whose first ones are those of `prefix`.

        Raises:
            ValueError: more than are left; ask `can_reserve` first.
        """
        if not self.can_reserve(blocks, prefix):
            raise ValueError(
                f"{blocks} blocks wanted, {self.total - self.reserved} of {self.total} unreserved"
            )
        self.promised += blocks
        reservation = Reservation(self, blocks)
        for whole in prefix:
            reservation.adopt(whole)
        return reservation

    # --- for reservations ----------------------------------------------------------------------

    def _take(self) -> int:
        """Return a block of any content for a promise: a free one, an untouched one, or the oldest kept."""
        gives_up = not self._free or self._free[0] >= max(self.touched, self.taken_freely)
        if gives_up and self._kept:
            block, whole = self._kept.popitem(last=False)
            self.index.remove(whole)
            del self._whole[block]
        else:
            block = heapq.heappop(self._free)
        self.touched = max(self.touched, block + 1)
        self.promised -= 1
        self._hold(block)
        return block

    def _adopt(self, whole: WholeBlock) -> None:
        self.changes += 1
        self.promised -= 1
        self._hold(whole.number)

    def _hold(self, block: int) -> None:
        self._kept.pop(block, None)
        self.used += self._holders[block] == 0
        self._holders[block] += 1

    def _let_go(self, block: int) -> None:
        self.changes += 1
        self._holders[block] -= 1
        if self._holders[block]:
            return
        self.used -= 1
        whole = self._whole.get(block)
        if whole is None:
            heapq.heappush(self._free, block)
        else:
            self._kept[block] = whole

    def _share(
        self, block: int, origin: str, before: WholeBlock | None, token_ids: Sequence[int]
    ) -> WholeBlock | None:
        """Make a written block known; if one with its content is, hold that in its place."""
        known = self.index.find(origin, before, token_ids)
        if known is not None:
            self._hold(known.number)
            self._let_go(block)
            return known
        whole = self.index.add(block, origin, before, token_ids)
        self.changes += 1
        if whole is not None:
            self._whole[block] = whole
        return whole


class Reservation:
    """One sequence's share of a pool."""

    def __init__(self, pool: BlockPool, blocks: int) -> None:
        self._pool = pool
        self._left = blocks
        self._whole: list[WholeBlock] = []
        self.table: list[int] = []
        """The block of each 128 positions so far."""

    @property
    def shared(self) -> Sequence[WholeBlock]:
        """The first blocks of the table: those that are whole and known to the index."""
        return self._whole

    def adopt(self, whole: WholeBlock) -> None:
        """Go on with a block that is written already, behind those that the sequence has.

        Raises:
            ValueError: the sequence has a block there, or is promised no more.
        """
        if len(self.table) != len(self._whole) or not self._left:
            raise ValueError(f"block {whole.number} can't be the {len(self._whole) + 1}th of {self.table}")
        self._pool._adopt(whole)
        self._left -= 1
        self.table.append(whole.number)
        self._whole.append(whole)

    def grow_to(self, positions: int) -> None:
        """Take blocks until `positions` fit.

        Raises:
            ValueError: the reservation was for fewer.
        """
        blocks = blocks_for(positions)
        if blocks > len(self.table) + self._left:
            raise ValueError(
                f"{positions} positions need more than the {len(self.table) + self._left} blocks reserved"
            )
        while len(self.table) < blocks:
            self._left -= 1
            self.table.append(self._pool._take())

    def share_whole(self, origin: str, token_ids: Sequence[int], positions: int) -> None:
        """Let others use the blocks that are whole now.

        Args:
            token_ids: of the sequence, from its first position on.
            positions: how many of them are written.
        """
        for index in range(len(self._whole), positions // BLOCK):
            before = self._whole[-1] if self._whole else None
            ids = token_ids[index * BLOCK : (index + 1) * BLOCK]
            whole = self._pool._share(self.table[index], origin, before, ids)
            if whole is None:
                return  # what comes behind it has nothing known before it
            self.table[index] = whole.number
            self._whole.append(whole)

    def release(self) -> None:
        """Give everything back, the last block first; a second call does nothing."""
        for block in reversed(self.table):
            self._pool._let_go(block)
        self._pool.promised -= self._left
        self._pool.changes += 1
        self.table, self._whole, self._left = [], [], 0
