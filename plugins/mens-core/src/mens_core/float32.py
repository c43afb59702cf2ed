"""Exact numbers, rounded once to float32. No numpy and no library function has a say."""

from __future__ import annotations

from fractions import Fraction
from math import isqrt

__all__ = ["exact", "nearest", "nearest_root"]

_SMALLEST_NORMAL = Fraction(1, 1 << 126)
_GREATEST = Fraction((1 << 24) - 1) * (1 << 104)


def exact(value: float) -> Fraction:
    """Return the float32 nearest to `value` as an exact number."""
    return Fraction(nearest(Fraction(value)))


def nearest(value: Fraction) -> float:
    """Return the nearest float32, ties to even; below 2^-126 in magnitude it is 0.

    Raises:
        OverflowError: it is above the greatest float32.
    """
    if value < 0:
        return -nearest(-value)
    if value == 0:
        return 0.0
    shift = value.numerator.bit_length() - value.denominator.bit_length() - 24
    scaled = value / Fraction(2) ** shift
    while scaled >= 1 << 24:
        scaled, shift = scaled / 2, shift + 1
    rounded = round(scaled) * Fraction(2) ** shift
    if rounded > _GREATEST:
        raise OverflowError(f"{float(value):g} is beyond float32")
    return 0.0 if rounded < _SMALLEST_NORMAL else float(rounded)


def nearest_root(value: Fraction) -> float:
    """Return the float32 nearest to the square root of a positive number, from integers."""
    # Scaled so that the integer root has more than 24 bits to spare; one sticky bit marks what it
    # cuts off, so that rounding it rounds the exact root.
    places = max(80, value.denominator.bit_length() - value.numerator.bit_length() + 80)
    scaled = (value.numerator << 2 * places) // value.denominator
    root = isqrt(scaled)
    is_exact = root * root == scaled and (value.numerator << 2 * places) % value.denominator == 0
    return nearest(Fraction(2 * root + (not is_exact), 1 << (places + 1)))
