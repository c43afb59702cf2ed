"""The next step of one sequence, begun before anyone asked for it.

Where the last token was the highest one, the next will be, too, as a rule. A step leaves on the device
what the step after it reads in that case (`vox_step_next`), so that one can be launched before the first
has been waited for: the GPU does not wait for the host. If something else is asked for, the step was for
nothing: what it wrote, its own position of the cache, is written again by whoever comes there, since
launches keep their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mens_core.ops import BLOCK, Batch, KvCache, ServedStep
from mens_torch_cuda.replay import Recording

__all__ = ["Foresight", "can_be_foreseen"]


@dataclass(frozen=True, slots=True)
class _Expected:
    """A step that runs, and the batch before it."""

    recording: Recording
    before: Batch


class Foresight:
    """At most one step that was begun ahead."""

    def __init__(self) -> None:
        self._expected: _Expected | None = None
        self._token: int | None = None
        """What the step ahead takes for granted, once it is known."""
        self._is_greedy = False

    def note_greed(self) -> None:
        """Note that the highest token of the last step was asked for."""
        self._is_greedy = True

    def take_greed(self) -> bool:
        """Whether it was, since the last call."""
        was, self._is_greedy = self._is_greedy, False
        return was

    def expect(self, recording: Recording, before: Batch) -> None:
        """Note a step that was begun behind the one of this batch."""
        self._expected, self._token = _Expected(recording, before), None

    def tell(self, highest: npt.NDArray[np.int32]) -> None:
        """Say which token the step in front of it found."""
        self._token = int(highest[0])

    def take(self, step: ServedStep, batch: Batch, cache: KvCache) -> Recording | None:
        """Return the step that was begun, if it is this one; it is forgotten in either case."""
        expected, self._expected = self._expected, None
        if expected is None:
            return None
        recording, before = expected.recording, expected.before
        is_same = (
            recording.step is step
            and recording.cache is cache
            and batch.token_ids.tolist() == [self._token]
            and np.array_equal(batch.positions, before.positions + 1)
            and np.array_equal(batch.block_tables, before.block_tables)
            and np.array_equal(batch.logit_rows, before.logit_rows)
        )
        return recording if is_same else None


def can_be_foreseen(batch: Batch) -> bool:
    """Whether the step after this one can be known: one row, whose next position is in the same KV block."""
    return len(batch.positions) == len(batch.logit_rows) == 1 and (int(batch.positions[0]) + 1) % BLOCK != 0
