"""Say every few seconds that a long step still runs."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

__all__ = ["PROGRESS_EVERY_S", "ticking"]

PROGRESS_EVERY_S = 5.0


@contextlib.contextmanager
def ticking(report: Callable[[str], None], what: str, every_s: float = PROGRESS_EVERY_S) -> Iterator[None]:
    """While the block runs, report `what` with the seconds since it began, every `every_s` seconds."""
    started = time.monotonic()
    done = threading.Event()

    def tick() -> None:
        while not done.wait(every_s):
            report(f"{what} ({time.monotonic() - started:.0f} s)")

    ticker = threading.Thread(target=tick, daemon=True)
    ticker.start()
    try:
        yield
    finally:
        done.set()
        ticker.join()
