"""A rate with its interval, and two rates of the same questions compared.

Closed forms, so the same answers give the same numbers everywhere.

Sources: Wilson 1927, J. Am. Stat. Assoc. 22; McNemar 1947, Psychometrika 12, in its exact form;
Newcombe 1998, Statistics in Medicine 17, 2635-2650, method 10, for the difference of paired rates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Comparison", "Rate", "compare", "rate_of"]

_Z = 1.959963984540054
"""The standard normal's 97.5th percentile: two-sided 95%."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How many of how many, with Wilson's 95% interval."""

    successes: int
    total: int
    low: float
    high: float

    @property
    def value(self) -> float:
        """The share."""
        return self.successes / self.total

    def __str__(self) -> str:
        interval = f"95% interval {self.low:.1%} to {self.high:.1%}"
        return f"{self.successes} of {self.total} ({self.value:.1%}; {interval})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The same questions answered before and after."""

    before: Rate
    after: Rate
    gained: int
    """Questions that only the second got right."""
    lost: int
    """Questions that only the first got right."""
    low: float
    high: float
    """Newcombe's 95% interval of after - before."""
    p_value: float
    """McNemar's exact two-sided test: how likely so uneven a split of gained and lost is by chance."""

    @property
    def difference(self) -> float:
        """Share after, less share before."""
        return self.after.value - self.before.value

    @property
    def is_improved(self) -> bool:
        """Whether the whole interval is above 0."""
        return self.low > 0

    def __str__(self) -> str:
        return (
            f"before {self.before}; after {self.after}; difference {self.difference:+.1%} "
            f"(95% interval {self.low:+.1%} to {self.high:+.1%}; {self.gained} gained, {self.lost} lost, "
            f"exact McNemar p = {self.p_value:.2g})"
        )


def rate_of(outcomes: Sequence[bool]) -> Rate:
    """Return the rate of the true ones.

    Raises:
        ValueError: there are none.
    """
    if not outcomes:
        raise ValueError("a rate of no outcomes")
    successes, total = sum(outcomes), len(outcomes)
    share, z2 = successes / total, _Z * _Z
    centre = (share + z2 / (2 * total)) / (1 + z2 / total)
    half = _Z * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total)) / (1 + z2 / total)
    # Rounding must not leave the bounds beside 0 and 1, where they are exactly.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == total else centre + half
    return Rate(successes, total, low, high)


def compare(before: Sequence[bool], after: Sequence[bool]) -> Comparison:
    """Compare two answers to each question, pair by pair.

    Raises:
        ValueError: they are not answers to the same number of questions, or there are none.
    """
    if len(before) != len(after):
        raise ValueError(f"{len(before)} outcomes before and {len(after)} after are no pairs")
    one, two = rate_of(before), rate_of(after)
    pairs = list(zip(before, after, strict=True))
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    phi = _correlation(both, lost, gained, neither)
    difference = two.value - one.value

    def distance(second: float, first: float) -> float:
        return math.sqrt(max(0.0, second**2 - 2 * phi * second * first + first**2))

    low = difference - distance(two.value - two.low, one.high - one.value)
    high = difference + distance(two.high - two.value, one.value - one.low)
    return Comparison(one, two, gained, lost, low, high, _mcnemar(gained, lost))


def _correlation(both: int, lost: int, gained: int, neither: int) -> float:
    """Return the correlation of the pairs, with Newcombe's correction for continuity."""
    margins = (both + lost) * (gained + neither) * (both + gained) * (lost + neither)
    if margins == 0:
        return 0.0
    product = float(both * neither - lost * gained)
    if product > 0:
        product = max(product - (both + lost + gained + neither) / 2, 0.0)
    return product / math.sqrt(margins)


def _mcnemar(gained: int, lost: int) -> float:
    changed = gained + lost
    tail = sum(math.comb(changed, k) for k in range(min(gained, lost) + 1))
    doubled: float = 2 * tail / 2**changed
    return min(1.0, doubled)
