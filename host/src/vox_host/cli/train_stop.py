"""Ctrl-C and SIGTERM while a run takes steps: the first waits for the step, the second doesn't."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Stop", "stop_on_signal"]


@dataclass(slots=True)
class Stop:
    """Whether the user wants the run to stop."""

    number: signal.Signals | None = None
    again: signal.Signals | None = None
    """The second one, which does not wait for the step."""

    def is_asked(self) -> bool:
        """Return whether there was a first signal."""
        return self.number is not None


@contextmanager
def stop_on_signal(say: Callable[[str], None], stop: Stop) -> Iterator[None]:
    """Let the first SIGINT or SIGTERM stop the run after its step, and the second one at once."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def hear(number: signal.Signals) -> None:
        if stop.number is None:
            stop.number = number
            say("stopping after this step; once more stops at once, without saving")
        elif task is not None:
            stop.again = stop.again or number
            task.cancel()

    numbers = (signal.SIGINT, signal.SIGTERM)
    for number in numbers:
        loop.add_signal_handler(number, hear, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
