"""The next step, begun before anyone asked for it.

Where every sequence has one row and its last token was the highest one, the next will be, too, as a rule. A
step leaves on the device what the step after it reads in that case (`vox_step_next`), so that one can be
launched before the first has been waited for: the GPU does not wait for the host. If something else is asked
for, what was begun was for nothing: what it wrote, its rows' own positions of the cache, is written again by
whoever comes there, since launches keep their order.

One sequence is another step's worth at most, once in an answer. Of many, someone ends or comes every few
steps. So theirs are begun once some steps in a row came as foreseen, and only as many pieces of them as the
GPU needs while the host thinks; the rest follows when the step was asked for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mens_core.ops import BLOCK, Batch, KvCache, ServedStep
from mens_torch_cuda.replay import Recording

__all__ = ["Foresight", "Pace", "can_be_foreseen", "has_one_row_each"]

_STEADY = 3
"""Steps that came as foreseen, before one of several rows is begun ahead."""


@dataclass(frozen=True, slots=True)
class _Last:
    """The last step, its batch, and what its rows found."""

    step: ServedStep
    cache: KvCache
    batch: Batch
    highest: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A step of which so many pieces are begun."""

    recording: Recording
    pieces: int


class Pace:
    """How much of a step passes on the GPU while the host is busy between two. Changes no byte."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._ended: float | None = None
        self._host = self._whole = 0.0
        """Seconds from the end of a step to the next one's launch, and to its end."""

    def forget(self) -> None:
        """Note that the next step does not follow the last one."""
        self._ended, self._host, self._whole = None, 0.0, 0.0

    def launch(self) -> None:
        """Note that the host launches a step."""
        if self._ended is not None:
            # Slowly down again: too much begun ahead costs little, a GPU that waits costs at once.
            self._host = max(self._clock() - self._ended, 0.9 * self._host)

    def end(self) -> None:
        """Note that a step has ended."""
        now = self._clock()
        if self._ended is not None:
            self._whole = now - self._ended
        self._ended = now

    def pieces(self, count: int) -> int:
        """How many of so many pieces of a step to begin: one more than the host's time is."""
        if self._whole <= 0.0:
            return 1
        return min(count, 1 + math.ceil(count * self._host / self._whole))


class Foresight:
    """What was found in the last step, and at most one step that was begun ahead."""

    def __init__(self, pace: Pace | None = None) -> None:
        self._pace = pace or Pace()
        self._last: _Last | None = None
        self._ahead: _Ahead | None = None
        self._steady = 0
        """Steps in a row that came as foreseen."""
        self.has_other_tables = False
        """Whether the present step was begun ahead, with block tables that have changed since."""
        self._is_greedy = self._was_greedy = False
        """Whether the highest tokens of the present step were asked for, and of the one before."""

    def note_greed(self) -> None:
        """Note that the highest token of each row of the last step was asked for."""
        self._is_greedy = True

    def meet(self, step: ServedStep, batch: Batch, cache: KvCache) -> tuple[Recording | None, int]:
        """Compare a step with what was foreseen; return it and its pieces that are begun, if it is that."""
        last, ahead = self._last, self._ahead
        self._last = self._ahead = None
        self.has_other_tables = False
        self._was_greedy, self._is_greedy = self._is_greedy, False
        if last is None or not self._was_greedy or not _follows(last, step, batch, cache):
            self._steady = 0
            self._pace.forget()
            return None, 0
        self._steady += 1
        if ahead is None:
            return None, 0
        self.has_other_tables = not np.array_equal(batch.block_tables, last.batch.block_tables)
        return ahead.recording, ahead.pieces

    def interrupt(self) -> None:
        """Note a step that is not recorded."""
        self._pace.forget()

    def launch(self) -> None:
        """Note that the host launches the step that was met, or the rest of it."""
        self._pace.launch()

    def wants(self, batch: Batch) -> bool:
        """Whether to begin the step after this one."""
        is_likely = self._steady >= _STEADY or (self._was_greedy and len(batch.positions) == 1)
        return is_likely and can_be_foreseen(batch)

    def pieces(self, recording: Recording) -> int:
        """How many pieces of it to begin."""
        return self._pace.pieces(len(recording.pieces))

    def expect(self, recording: Recording, pieces: int) -> None:
        """Note a step of which so many pieces were begun behind the present one."""
        self._ahead = _Ahead(recording, pieces)

    def end(self, recording: Recording, batch: Batch) -> None:
        """Note a step that has ended, whose batch this was."""
        self._pace.end()
        if recording.highest is not None:
            self._last = _Last(recording.step, recording.cache, batch, recording.highest.copy())


def _follows(last: _Last, step: ServedStep, batch: Batch, cache: KvCache) -> bool:
    """Whether each row is the next of its sequence, has the highest token and reads known blocks."""
    is_next = (
        last.step is step
        and last.cache is cache
        and batch.block_tables.shape == last.batch.block_tables.shape
        and np.array_equal(batch.token_ids, last.highest)
        and np.array_equal(batch.positions, last.batch.positions + 1)
        and np.array_equal(batch.logit_rows, last.batch.logit_rows)
    )
    if not is_next or not has_one_row_each(batch):
        return False
    is_read = np.arange(batch.block_tables.shape[1]) <= batch.positions[:, None] // BLOCK
    return bool(((batch.block_tables == last.batch.block_tables) | ~is_read).all())


def has_one_row_each(batch: Batch) -> bool:
    """Whether every sequence has one row, and logits are wanted of it."""
    return len(batch.positions) == len(batch.logit_rows) == len(batch.block_tables)


def can_be_foreseen(batch: Batch) -> bool:
    """Whether the step after this one can be known: a row each, and a KV block for the next one."""
    if not has_one_row_each(batch):
        return False
    blocks = (batch.positions + 1) // BLOCK
    if blocks.max() >= batch.block_tables.shape[1]:
        return False
    return bool((batch.block_tables[np.arange(len(blocks)), blocks] >= 0).all())
