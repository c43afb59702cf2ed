"""Give memory back after large requests: the allocator keeps what a body, its text and its tokens took."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from vox_host.models.tokenizer_file import trim_heap

__all__ = ["LARGE_BYTES", "HeapKeeper"]

LARGE_BYTES = 256 * 1024
PAUSE_S = 2.0


class HeapKeeper:
    """Trims the heap a moment after large requests, however many there are: once per `pause_s`."""

    def __init__(self, trim: Callable[[], None] = trim_heap, pause_s: float = PAUSE_S) -> None:
        self._trim = trim
        self._pause_s = pause_s
        self._pending: asyncio.Task[None] | None = None

    def after_request(self, body_bytes: int, *, is_encoded: bool) -> None:
        """Note that a request is over; `body_bytes` came over the wire, more if it was encoded."""
        if (body_bytes > LARGE_BYTES or is_encoded) and (self._pending is None or self._pending.done()):
            self._pending = asyncio.create_task(self._trim_later())

    async def close(self) -> None:
        """End what is pending."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    async def _trim_later(self) -> None:
        # The request and what was made of it are dropped only once it has been answered.
        await asyncio.sleep(self._pause_s)
        await asyncio.to_thread(self._trim)
