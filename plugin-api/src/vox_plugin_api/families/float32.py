"""float32 values of exact numbers, without numpy."""

from __future__ import annotations

import struct
from fractions import Fraction
from math import isqrt

__all__ = ["float32", "inverse_square_root", "square_root"]


def float32(value: Fraction) -> float:
    """Return `value`, below 2^64, rounded twice: by way of the float64 that the text meant."""
    rounded: float = struct.unpack("<f", struct.pack("<f", float(value)))[0]
    return rounded


def square_root(value: Fraction) -> float:
    """Return the float32 nearest to sqrt(value), from integers."""
    # What isqrt cuts off is marked by one sticky bit below 80 fractional bits, so rounding once more
    # to 24 bits gives what rounding the exact root would.
    scaled = (value.numerator << 160) // value.denominator
    root = isqrt(scaled)
    sticky = 0 if root * root == scaled else 1
    return _nearest_float32(Fraction(2 * root + sticky, 1 << 81))


def inverse_square_root(value: Fraction) -> float:
    """Return the float32 nearest to 1 / sqrt(value), from integers."""
    return square_root(1 / value)


def _nearest_float32(value: Fraction) -> float:
    shift = value.numerator.bit_length() - value.denominator.bit_length() - 24
    scaled = value / Fraction(2) ** shift
    while scaled >= 1 << 24:
        scaled, shift = scaled / 2, shift + 1
    return float(round(scaled) * Fraction(2) ** shift)
