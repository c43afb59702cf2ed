"""Which KV block holds the keys and values of which tokens.

A whole block is found by a hash that is chained over the blocks before it, and taken only if the
ids themselves agree, its own and, by way of the blocks before it, all from the first position on.
`origin` says what else decides its bytes, and is compared as it is, too. Knows nothing of who uses
a block, or when it is given up: that is `kv_blocks`.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mens_core.ops import BLOCK

__all__ = ["PrefixIndex", "WholeBlock"]

Hash = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True, eq=False)
class WholeBlock:
    """A block all of whose positions are written, and what stands in it. Equal to itself only."""

    number: int
    origin: str
    """What decides its bytes beside the ids: the same for all blocks before it."""
    before: WholeBlock | None
    """The block of the 128 positions before its own; None: it is a sequence's first."""
    token_ids: tuple[int, ...]
    """[128]"""
    key: bytes


class PrefixIndex:
    """The whole blocks that may be shared, by what stands in them and before them."""

    def __init__(self, digest: Hash = lambda data: hashlib.sha256(data).digest()) -> None:
        """`digest` is a parameter so that a test can bring one that collides."""
        self._digest = digest
        self._blocks: dict[bytes, WholeBlock] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def find(self, origin: str, before: WholeBlock | None, token_ids: Sequence[int]) -> WholeBlock | None:
        """Return the block that holds these 128 ids behind `before`; None: there is none.

        Args:
            before: a block that was found or added, and not removed since.
        """
        ids = tuple(token_ids)
        found = self._blocks.get(self._key(origin, before, ids))
        # Chained ids agree from the start if this block's do and the one before is the very same.
        if found is None or (found.origin, found.token_ids) != (origin, ids) or found.before is not before:
            return None
        return found

    def add(
        self, number: int, origin: str, before: WholeBlock | None, token_ids: Sequence[int]
    ) -> WholeBlock | None:
        """Note what block `number` holds; None: another block has that key, and nothing was noted.

        Raises:
            ValueError: it is not a whole block.
        """
        ids = tuple(token_ids)
        if len(ids) != BLOCK:
            raise ValueError(f"block {number} has {len(ids)} ids: only one with {BLOCK} can be shared")
        whole = WholeBlock(number, origin, before, ids, self._key(origin, before, ids))
        if self._blocks.setdefault(whole.key, whole) is not whole:
            return None
        return whole

    def remove(self, whole: WholeBlock) -> None:
        """Forget a block whose content will be written over."""
        del self._blocks[whole.key]

    def _key(self, origin: str, before: WholeBlock | None, ids: tuple[int, ...]) -> bytes:
        chained = origin.encode() if before is None else before.key
        return self._digest(chained + array("q", ids).tobytes())
