"""Bytes of a file to the GPU: through pinned pieces that several threads fill while others are on their way.

The driver copies memory that is not pinned by one thread, page by page of a mapping; a plain read of the same
file is then faster than the load. Whose memory and whose queue is `Carrier`'s, so this runs without a GPU.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["PIECE", "Carrier", "Uploads"]

PIECE = 4 << 20
"""Bytes of a pinned piece."""
_SLOTS = 16
_THREADS = 8

Bytes = npt.NDArray[np.uint8]


class Carrier(Protocol):
    """Pinned memory and a queue of copies from it."""

    def pinned(self, nbytes: int) -> Bytes:
        """Return memory that the device can copy from by itself."""

    def send(self, source: Bytes, target: Any, first: int) -> Callable[[], None]:
        """Queue a copy onto bytes of `target`, from `first` on; what is returned waits for its end."""

    def release(self) -> None:
        """Give the pinned memory back: no copy from it is queued any more."""


@dataclass(slots=True)
class _Slot:
    memory: Bytes
    wait: Callable[[], None]
    """For the end of the last copy from it: before, it must not be written."""


class Uploads:
    """Copies arrays of bytes; made when the first is copied, let go of with `close`."""

    def __init__(self, carrier: Carrier, *, slots: int = _SLOTS, piece: int = PIECE) -> None:
        """Take pinned memory: `slots` pieces of `piece` bytes."""
        self._carrier = carrier
        self._piece = piece
        whole = carrier.pinned(slots * piece)
        parts = (whole[i * piece : (i + 1) * piece] for i in range(slots))
        self._free = deque(_Slot(part, lambda: None) for part in parts)
        self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "vox-upload")

    def copy(self, source: Bytes, target: Any) -> None:
        """Copy `source`, which may be unmapped as soon as this returns, onto `target`.

        On return every copy is queued: what is queued behind them finds the bytes.
        """
        filling: deque[tuple[_Slot, Future[None], int, int]] = deque()
        for first in range(0, len(source), self._piece):
            if not self._free:
                self._send_oldest(filling, target)
            slot = self._free.popleft()
            piece = source[first : first + self._piece]
            filling.append((slot, self._threads.submit(_fill, slot, piece), first, len(piece)))
        while filling:
            self._send_oldest(filling, target)

    def close(self) -> None:
        """Wait for the last copies; end the threads and give the pinned memory back."""
        for slot in self._free:
            slot.wait()
        self._free.clear()
        self._threads.shutdown()
        self._carrier.release()

    def _send_oldest(self, filling: deque[tuple[_Slot, Future[None], int, int]], target: Any) -> None:
        slot, filled, first, nbytes = filling.popleft()
        filled.result()
        slot.wait = self._carrier.send(slot.memory[:nbytes], target, first)
        self._free.append(slot)


def _fill(slot: _Slot, piece: Bytes) -> None:
    slot.wait()
    np.copyto(slot.memory[: len(piece)], piece)
