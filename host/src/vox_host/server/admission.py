"""How many answers run and wait at once; more are refused at the door, with a time to come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from vox_host.counted import agreeing, counted
from vox_host.server.api_error import ApiError

__all__ = ["Admission"]


class Admission:
    """Counts answers (one per prompt and choice), not requests: that is what costs memory."""

    def __init__(self, *, running: int = 64, waiting: int = 192) -> None:
        self.limit = running + waiting
        self._outstanding = 0
        self._slots = asyncio.Semaphore(running)

    @property
    def outstanding(self) -> int:
        """Answers that run or wait."""
        return self._outstanding

    @contextlib.contextmanager
    def admitted(self, answers: int) -> Iterator[asyncio.Semaphore]:
        """Count `answers` in for the length of a request; each then takes a slot of its own to run.

        Raises:
            ApiError: 400 if so many can never be admitted, 429 if not now.
        """
        if answers > self.limit:
            raise ApiError(
                400,
                f"the request asks for {answers} answers; the limit is {self.limit} (prompts times n)",
                code="too_many_answers",
                param="n",
            )
        if self._outstanding + answers > self.limit:
            wait = agreeing(self._outstanding, "runs or waits", "run or wait")
            raise ApiError(
                429,
                f"{counted(self._outstanding, 'answer')} {wait} already; the limit is {self.limit}. "
                "Nothing was started; try again",
                code="queue_full",
                headers={"retry-after": "1"},
            )
        self._outstanding += answers
        try:
            yield self._slots
        finally:
            self._outstanding -= answers
