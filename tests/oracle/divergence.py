"""Mean KL divergence to a true distribution, and two parties compared by it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Ratio", "compare", "divergence"]

Array = npt.NDArray[np.float64]


def _log_softmax(logits: npt.NDArray[np.floating]) -> Array:
    """Natural-log probabilities in float64."""
    shifted = logits.astype(np.float64) - np.float64(logits.max())
    return shifted - np.log(np.exp(shifted).sum())


def divergence(true_logits: npt.NDArray[np.floating], logits: npt.NDArray[np.floating]) -> float:
    """KL(true || other) of one position, in nats."""
    true = _log_softmax(true_logits)
    return float((np.exp(true) * (true - _log_softmax(logits))).sum())


@dataclass(frozen=True)
class Ratio:
    """Mean KL of one party over that of another, with a 95 % interval."""

    value: float
    low: float
    high: float


def compare(ours: Sequence[float], theirs: Sequence[float], draws: int = 10_000) -> Ratio:
    """Compare two parties on the same sequences, given each sequence's sum over its positions.

    Means are over positions. The interval is a bootstrap (percentiles) that draws whole
    sequences with both parties' sums: positions of one sequence share their errors, through the
    keys and values of what came before, so they are no independent draws.
    """
    pairs = np.array([ours, theirs])
    drawn = np.random.default_rng(0).integers(0, pairs.shape[1], (draws, pairs.shape[1]))
    sums = pairs[:, drawn].sum(axis=2)
    low, high = np.percentile(sums[0] / sums[1], [2.5, 97.5])
    return Ratio(float(pairs[0].sum() / pairs[1].sum()), float(low), float(high))
