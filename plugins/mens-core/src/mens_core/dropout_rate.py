"""What a dropout rate means in integers and one float32 (docs/numerics.md)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from mens_core.float32 import nearest

__all__ = ["DropoutRate"]


@dataclass(frozen=True, slots=True)
class DropoutRate:
    """Elements whose random word is below `threshold` are dropped, others multiplied by `factor`."""

    threshold: int
    """floor(rate * 2^32)."""
    factor: float
    """The float32 nearest to 1 / (1 - rate)."""

    @classmethod
    def of(cls, rate: float) -> DropoutRate:
        """Take the exact value of a float from 0 up to 1.

        Raises:
            ValueError: it is outside.
        """
        if not 0 <= rate < 1:
            raise ValueError(f"a dropout rate lies in [0, 1); it is {rate}")
        exact = Fraction(rate)
        return cls(int(exact * (1 << 32)), nearest(1 / (1 - exact)))
