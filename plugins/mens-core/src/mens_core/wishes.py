"""What is asked of the logits of a step, said before it runs, so that a lane may wait once for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from mens_core.ops import Ops

__all__ = ["Draw", "Penalty", "Reading", "Wish", "read_logits"]

Draw = Callable[[npt.NDArray[np.uint64]], int]
"""From the weights [V] of `Ops.token_weights` to a token."""


class Penalty(NamedTuple):
    """The arguments of `Ops.penalise` for one row."""

    token_ids: npt.NDArray[np.int32]
    repetition: npt.NDArray[np.float32]
    subtract: npt.NDArray[np.float32]


class Wish(NamedTuple):
    """What is asked of one row of a step's logits, in this order."""

    row: int
    """Among the batch's `logit_rows`."""
    is_scored: bool = False
    """Its logits as the model made them, and their log-normaliser."""
    penalty: Penalty | None = None
    """Changes the row, after that."""
    is_chosen: bool = False
    """A token: of the highest logit, or as `draw` says."""
    draw: Draw | None = None
    temperature: float = 0.0
    """Of the weights that `draw` is given."""

    @property
    def is_for_greatest(self) -> bool:
        """Whether nothing is asked but the token of the highest logit, as the model made it."""
        return self.is_chosen and self.draw is None and not self.is_scored and self.penalty is None


class Reading(NamedTuple):
    """What became of a wish."""

    logits: npt.NDArray[np.float32] | None = None
    """[V], until the next step."""
    normaliser: np.float32 | None = None
    token_id: int | None = None
    fault: str | None = None
    """The first operator that was not finite in reading this row; the rest is then not there."""


def read_logits(ops: Ops, logits: Any, wishes: Sequence[Wish]) -> list[Reading]:
    """Read one thing after the other, over the operators: what `Ops.run_and_read` means.

    Penalties change `logits` in place.
    """
    if all(wish.is_for_greatest for wish in wishes):
        highest = ops.argmax(logits).tolist() if wishes else []
        return [Reading(token_id=highest[wish.row]) for wish in wishes]
    scores, faults = _scored(ops, logits, wishes)
    tokens: dict[int, int] = {}
    for i, wish in enumerate(wishes):
        if wish.penalty is not None:
            ids, repetition, subtract = wish.penalty
            ops.penalise(logits, wish.row, ids, repetition=repetition, subtract=subtract)
            for fault in ops.take_faults():
                faults.setdefault(i, fault.name)
        if wish.is_chosen and wish.draw is not None and i not in faults:
            tokens[i] = wish.draw(ops.token_weights(logits, wish.row, wish.temperature))
    greedy = [i for i, wish in enumerate(wishes) if wish.is_chosen and wish.draw is None and i not in faults]
    if greedy:
        highest = ops.argmax(logits).tolist()
        tokens.update({i: highest[wishes[i].row] for i in greedy})
    readings = []
    for i in range(len(wishes)):
        values, normaliser = scores.get(i, (None, None))
        is_whole = i not in faults
        readings.append(Reading(values, normaliser, tokens.get(i)) if is_whole else Reading(fault=faults[i]))
    return readings


def _scored(
    ops: Ops, logits: Any, wishes: Sequence[Wish]
) -> tuple[dict[int, tuple[npt.NDArray[np.float32], np.float32]], dict[int, str]]:
    """Logits and normalisers by the number of the wish, and the operator of those that are not finite."""
    scored = [i for i, wish in enumerate(wishes) if wish.is_scored]
    if not scored:
        return {}, {}
    rows = ops.take_rows(logits, np.array([wishes[i].row for i in scored], np.int32))
    normalisers = ops.log_normaliser(rows)
    faults = {scored[row]: fault.name for fault in reversed(ops.take_faults()) for row in fault.rows}
    found = {}
    for n, (i, values) in enumerate(zip(scored, ops.to_host(rows), strict=True)):
        if i not in faults:
            # A lane's rows may be views of what the row's penalty is about to change.
            found[i] = (values if wishes[i].penalty is None else values.copy(), normalisers[n])
    return found, faults
