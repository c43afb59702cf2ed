"""pi, logarithm and exponential in integers, for constants that every machine must agree on.

A real number x is held as the integer nearest below x * 2^P, within a few hundred units; the
caller works with `GUARD_BITS` more than it keeps and checks that the error can't matter
(`floor_to_bits`). No float takes part.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

__all__ = ["GUARD_BITS", "exp_negative", "floor_to_bits", "from_fraction", "log", "pi"]

GUARD_BITS = 64
"""The functions here are wrong by far less than 2^GUARD_BITS units of their last place."""


def from_fraction(value: Fraction, precision: int) -> int:
    """Return floor(value * 2^precision)."""
    return (value.numerator << precision) // value.denominator


def floor_to_bits(real: Callable[[int], int], bits: int) -> int:
    """Return floor(x * 2^bits) of the real number that `real(P)` gives with P fractional bits.

    Precision grows until the error of `real` (below 2^GUARD_BITS units) can't move the floor.
    An x that is exactly on the grid must not come here: it would never settle.
    """
    for precision in range(bits + 2 * GUARD_BITS, bits + 64 * GUARD_BITS, 2 * GUARD_BITS):
        value = real(precision)
        error = 1 << GUARD_BITS
        shift = precision - bits
        low, high = (value - error) >> shift, (value + error) >> shift
        if low == high:
            return low
    raise ArithmeticError("a constant lies exactly on the grid it should be rounded to")


@lru_cache(maxsize=64)  # every pair of a table asks for the same few constants
def pi(precision: int) -> int:
    """Machin: pi = 16 atan(1/5) - 4 atan(1/239)."""
    return 16 * _arctan_inverse(5, precision) - 4 * _arctan_inverse(239, precision)


@lru_cache(maxsize=64)
def log(value: Fraction, precision: int) -> int:
    """Natural logarithm of a positive rational."""
    # value = m * 2^exponent with m in (1/2, 2), then ln m = 2 atanh((m - 1) / (m + 1)).
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    mantissa = value / Fraction(2) ** exponent
    return exponent * _log_near_one(Fraction(2), precision) + _log_near_one(mantissa, precision)


def exp_negative(exponent: int, precision: int) -> int:
    """exp(-y) for y = exponent / 2^precision, y >= 0."""
    log2 = _log_near_one(Fraction(2), precision)
    halvings, rest = divmod(exponent, log2)
    total = term = 1 << precision
    k = 1
    while term:
        term = (term * rest >> precision) // k
        total += -term if k % 2 else term
        k += 1
    return total >> halvings


def _arctan_inverse(n: int, precision: int) -> int:
    total, power, k = 0, (1 << precision) // n, 0
    while power:
        term = power // (2 * k + 1)
        total += -term if k % 2 else term
        power //= n * n
        k += 1
    return total


@lru_cache(maxsize=64)
def _log_near_one(mantissa: Fraction, precision: int) -> int:
    t = from_fraction((mantissa - 1) / (mantissa + 1), precision)
    square = (t * t) >> precision
    total, power, k = 0, t, 0
    while power not in (0, -1):
        total += power // (2 * k + 1)
        power = (power * square) >> precision
        k += 1
    return 2 * total
