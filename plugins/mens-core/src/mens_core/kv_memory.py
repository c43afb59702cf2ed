"""What of a device's memory KV blocks may take, measured when it matters.

A cache is planned as a model is loaded, by what is free then. Where a block's memory is taken only when it
is first written to, others may have taken it in the meantime: so it is measured again before a request is
admitted for whom blocks may have to be touched that nobody has touched yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mens_core.kv_blocks import BlockPool
from mens_core.prefix_index import WholeBlock
from mens_core.weights_fit import RESERVE_BYTES
from vox_plugin_api.backend import BackendError

__all__ = ["FreeBytes", "KvMemory", "usable_bytes"]

FreeBytes = Callable[[], int | None]
"""Measures the bytes that could be taken now; None: it can't be told here."""


def usable_bytes(free: int) -> int:
    """Return what a cache may take of `free` bytes: a tenth is left for the steps, 256 MiB at most."""
    return free - min(RESERVE_BYTES, free // 10)


@dataclass(frozen=True, slots=True)
class KvMemory:
    """The memory of a pool whose blocks take it when they are first written to."""

    block_bytes: int
    free_bytes: FreeBytes
    taken_freely: int
    """How many blocks may have been touched before kept ones make place, if there is memory for them."""

    def refusal(self, pool: BlockPool, blocks: int, prefix: Sequence[WholeBlock]) -> BackendError | None:
        """Say why a sequence can't have its blocks now, in an error; None: there is memory for them.

        Measures only if something may have to be touched. Where memory is scarce, kept blocks make place
        before anything is touched for their sake.
        """
        reserved = pool.reserved_with(blocks, prefix)
        takes = pool.promised + blocks - len(prefix)
        if takes <= pool.idle or max(reserved, self.taken_freely) <= pool.touched:
            return None
        free = self.free_bytes()
        if free is None:
            return None
        room = usable_bytes(free) // self.block_bytes
        needed = reserved - pool.touched
        pool.taken_freely = min(self.taken_freely, pool.touched + room)
        if needed <= room:
            return None
        return BackendError(
            "insufficient-memory",
            f"the request needs {needed} more KV blocks of {self.block_bytes} bytes, and {free} bytes that "
            f"are free here have room for {room}; it was not started",
            facts={
                "needed_blocks": needed,
                "free_blocks": room,
                "block_bytes": self.block_bytes,
                "free_bytes": free,
            },
            remedy="Shorten the prompt, lower max_tokens, or close other programs.",
        )
