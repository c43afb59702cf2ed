"""Which examples a step takes, when something is due, and when a run ends. Pure.

All of it follows from the step's number, the seed and the evaluations so far: a run that goes on
from a checkpoint decides as the one that was never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

__all__ = [
    "Course",
    "EndReason",
    "Pace",
    "Scored",
    "batch_of",
    "checkpoints_to_keep",
    "mean_loss",
    "steps_per_epoch",
]

EndReason = Literal["steps", "patience"]
Order = Callable[[int, int, int], Sequence[int]]
"""(seed, epoch, count) to the order of an epoch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pace:
    """How often, and how long."""

    steps: int
    eval_every: int
    save_every: int
    keep_last: int
    """Checkpoints that are kept, beside the best one."""
    patience: int | None
    """Evaluations in a row without gain that end the run; None: none do."""

    def is_evaluation_due(self, step: int) -> bool:
        """Say whether to evaluate after `step` steps: at the end in any case."""
        return step % self.eval_every == 0 or step == self.steps

    def is_save_due(self, step: int) -> bool:
        """Say whether to save after `step` steps: at the end in any case."""
        return step % self.save_every == 0 or step == self.steps

    def evaluations_from(self, step: int) -> int:
        """Count the evaluations that are due from step `step`, itself included, to the end."""
        return _due_from(step, self.eval_every, self.steps)

    def saves_from(self, step: int) -> int:
        """Count the saves that are due from step `step`, itself included, to the end."""
        return _due_from(step, self.save_every, self.steps)


def _due_from(step: int, every: int, steps: int) -> int:
    return -(-steps // every) - (step - 1) // every


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """How far a run is, and what its evaluations said."""

    step: int = 0
    """Steps taken."""
    first_loss: float | None = None
    """On the held-out examples before the first step."""
    best_loss: float | None = None
    best_step: int | None = None
    """None: nothing was evaluated since the start, or nothing is held out."""
    without_gain: int = 0
    """Evaluations in a row, up to now, that were no better than the best."""

    def stepped(self) -> Course:
        """Return the course one step later."""
        return replace(self, step=self.step + 1)

    def evaluated(self, loss: float) -> Course:
        """Return the course with an evaluation after `self.step` steps.

        The one before the first step is where the run comes from, and no candidate for the best.
        """
        if self.step == 0:
            return replace(self, first_loss=loss)
        if self.best_loss is None or loss < self.best_loss:
            return replace(self, best_loss=loss, best_step=self.step, without_gain=0)
        return replace(self, without_gain=self.without_gain + 1)

    def end(self, pace: Pace) -> EndReason | None:
        """Say why the run ends here; None: it goes on."""
        if self.step >= pace.steps:
            return "steps"
        if pace.patience is not None and self.without_gain >= pace.patience:
            return "patience"
        return None


@dataclass(frozen=True, slots=True)
class Scored:
    """The loss of one example, summed over its trained tokens."""

    loss: float
    trained_tokens: int


def mean_loss(scores: Sequence[Scored]) -> float:
    """Return the mean over all trained tokens, whatever example they are in.

    The sum is exact and rounded once, so neither the order nor how examples were cut into requests shows.

    Raises:
        ValueError: no token is trained.
    """
    tokens = sum(score.trained_tokens for score in scores)
    if tokens == 0:
        raise ValueError("no trained token")
    return float(sum((Fraction(score.loss) for score in scores), Fraction()) / tokens)


def steps_per_epoch(examples: int, batch_size: int) -> int:
    """Return how many steps see every example once; the last of them may be smaller."""
    return math.ceil(examples / batch_size)


def batch_of(
    step: int, *, examples: int, batch_size: int, seed: int, order: Order
) -> tuple[int, Sequence[int]]:
    """Return the epoch (from 0) and the examples' indices of the step after `step` steps."""
    epoch, place = divmod(step, steps_per_epoch(examples, batch_size))
    return epoch, order(seed, epoch, examples)[place * batch_size : (place + 1) * batch_size]


def checkpoints_to_keep(there: Collection[int], pace: Pace, *, best: int | None) -> set[int]:
    """Return which checkpoints (by step) stay: the newest, the last that were due, the best.

    One that an interruption made is kept only while it is the newest, so that a run that was stopped
    and resumed ends with the same folders as one that was not.
    """
    due = sorted(step for step in there if pace.is_save_due(step))[-pace.keep_last :]
    kept = {max(there), *due} if there else set()
    return kept if best is None or best not in there else {*kept, best}
