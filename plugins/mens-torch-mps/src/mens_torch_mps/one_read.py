"""A whole step with what is read of its logits: queued as one, and read back as one.

Reading is what submits the queue and waits. So everything that a step gives back lies in one piece of memory:
what was chosen, weights, scores, and last the flags of rows that were not finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device
from mens_core.ops import Fault
from mens_core.wishes import Reading, Wish

__all__ = ["PENALISING", "SCORING", "Places", "by_wish", "readings"]

SCORING, PENALISING = "log_normaliser", "penalise"
"""Names of the operators that read logits and may not be finite."""
_ALIGNED = 16


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Where the results of a step lie: byte offsets in one buffer."""

    whole: Buffer
    nbytes: int
    rows: int
    width: int
    """Of a row of logits."""
    scored: tuple[int, ...]
    """Numbers of the wishes that are scored, and of those that draw from weights."""
    drawn: tuple[int, ...]
    highest_at: int
    normalisers_at: int
    scores_at: int
    weights_at: int
    flags_at: tuple[int, ...]
    """Of each buffer of flags."""

    @classmethod
    def reserve(
        cls, device: Device, wishes: Sequence[Wish], rows: int, width: int, flags: Sequence[int]
    ) -> Places:
        """Reserve memory for what is wished of logits [rows, width], and so many flags of each buffer."""
        scored = tuple(i for i, wish in enumerate(wishes) if wish.is_scored)
        drawn = tuple(i for i, wish in enumerate(wishes) if wish.is_chosen and wish.draw is not None)
        sizes = (4 * rows, 4 * len(scored), 4 * width * len(scored), 8 * width * len(drawn))
        starts = [0]
        for size in (*sizes, *(4 * count for count in flags)):
            starts.append(starts[-1] + -(-size // _ALIGNED) * _ALIGNED)
        whole = device.empty(starts[-1])
        highest, normalisers, scores, weights, *last = starts[:-1]
        return cls(
            whole,
            starts[-1],
            rows,
            width,
            scored,
            drawn,
            highest_at=highest,
            normalisers_at=normalisers,
            scores_at=scores,
            weights_at=weights,
            flags_at=tuple(last),
        )

    def weights_of(self, number: int) -> tuple[int, int]:
        """Return where the weights of the wish of this number start, and their bytes."""
        nbytes = 8 * self.width
        return self.weights_at + self.drawn.index(number) * nbytes, nbytes


def by_wish(faults: Sequence[Fault], wishes: Sequence[Wish]) -> list[Fault]:
    """The faults of reading, their rows being numbers of wishes instead of what their kernels number."""
    scored = [i for i, wish in enumerate(wishes) if wish.is_scored]
    penalised = {wish.row: i for i, wish in enumerate(wishes) if wish.penalty is not None}
    return [
        Fault(
            fault.name, tuple(scored[row] if fault.name == SCORING else penalised[row] for row in fault.rows)
        )
        for fault in faults
    ]


def readings(
    places: Places,
    wishes: Sequence[Wish],
    found: npt.NDArray[np.uint8],
    faults: Sequence[Fault],
    spoiled: set[int],
) -> list[Reading]:
    """Take the results apart; draws are made here. Pure.

    Args:
        found: the bytes of `places`.
        faults: of reading, their rows being numbers of wishes; first operator first.
        spoiled: numbers of wishes whose rows the step itself spoiled.
    """
    wrong: dict[int, str] = {}
    for fault in faults:
        for number in fault.rows:
            wrong.setdefault(number, fault.name)

    def part(at: int, dtype: npt.DTypeLike, count: int) -> npt.NDArray[Any]:
        return found[at : at + count * np.dtype(dtype).itemsize].view(dtype)

    highest = part(places.highest_at, np.int32, places.rows)
    normalisers = part(places.normalisers_at, np.float32, len(places.scored))
    scores = part(places.scores_at, np.float32, len(places.scored) * places.width)
    made = []
    for number, wish in enumerate(wishes):
        if number in spoiled or number in wrong:
            made.append(Reading(fault=None if number in spoiled else wrong[number]))
            continue
        logits, normaliser, token = None, None, None
        if wish.is_scored:
            at = places.scored.index(number)
            logits, normaliser = scores[at * places.width : (at + 1) * places.width], normalisers[at]
        if wish.is_chosen and wish.draw is None:
            token = int(highest[wish.row])
        elif wish.draw is not None:
            start, nbytes = places.weights_of(number)
            token = wish.draw(part(start, np.uint64, nbytes // 8))
        made.append(Reading(logits, normaliser, token))
    return made
