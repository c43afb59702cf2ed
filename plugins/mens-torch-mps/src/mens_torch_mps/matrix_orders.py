"""How a SIMD-group matrix may add eight products and a sum: every order that is known or plausible, exactly.

And operands for which no two of them give the same bits. Pure.

Numbers are float32 values held in Python's floats; what is rounded is rounded from exact rationals.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from mens_core.philox import philox_words

__all__ = ["CANONICAL", "ORDERS", "UNKNOWN", "VECTORS", "Operands", "classify", "expected"]

CANONICAL = "fma, ascending"
"""The chain of docs/numerics.md, section 5: the only one that a lane may use."""
UNKNOWN = "unknown"
_TERMS = 8
_NAN = 0x7FC00000
"""For every NaN: their bits say nothing of the order."""
_SMALLEST = Fraction(1, 1 << 126)
_BEYOND = Fraction(1 << 128)
_GREATEST = _BEYOND - (1 << 104)


class Operands(NamedTuple):
    """One sum: c and the products of a and b."""

    a: tuple[float, ...]
    b: tuple[float, ...]
    c: float


# --- rounding --------------------------------------------------------------------------------------


def _rounded(
    exact: Fraction, *, bits: int = 24, is_cut: bool = False, keeps_subnormals: bool = False
) -> float:
    """An exact number other than 0, rounded to nearest even, or cut off, and flushed below 2^-126."""
    size = abs(exact)
    shift = size.numerator.bit_length() - size.denominator.bit_length() - bits
    while size / Fraction(2) ** shift >= 1 << bits:
        shift += 1
    if keeps_subnormals:
        shift = max(shift, -149)
    scaled = size / Fraction(2) ** shift
    made = (scaled.__floor__() if is_cut else round(scaled)) * Fraction(2) ** shift
    if made < _SMALLEST and not keeps_subnormals:
        made = Fraction(0)
    value = float(made) if made < _BEYOND else float(_GREATEST) if is_cut else math.inf
    return -value if exact < 0 else value


def _fma(a: float, b: float, c: float, *, is_cut: bool = False, keeps_subnormals: bool = False) -> float:
    if not math.isfinite(c):
        return c
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        # -0 only of zeros that are both negative; what cancels is +0.
        sign = math.copysign(1, a) * math.copysign(1, b)
        is_negative = c == 0 and (a == 0 or b == 0) and sign < 0 and math.copysign(1, c) < 0
        return -0.0 if is_negative else 0.0
    return _rounded(exact, is_cut=is_cut, keeps_subnormals=keeps_subnormals)


def _add(a: float, b: float) -> float:
    if math.isinf(a) and math.isinf(b):
        return a if a == b else math.nan
    return _fma(a, 1.0, b) if math.isfinite(a) else a


def _product(a: float, b: float) -> float:
    return _fma(a, b, math.copysign(0.0, math.copysign(1, a) * math.copysign(1, b)))


def _exact(v: Operands, first: int = 0, count: int = _TERMS) -> Fraction:
    return sum((Fraction(v.a[k]) * Fraction(v.b[k]) for k in range(first, first + count)), start=Fraction(0))


def _chain(v: Operands, order: Sequence[int], start: float, **how: bool) -> float:
    total = start
    for k in order:
        total = _fma(v.a[k], v.b[k], total, **how)
    return total


# --- orders ----------------------------------------------------------------------------------------


def _in_groups(v: Operands, count: int) -> float:
    """Sums of `count` products, exact and rounded with what is before them."""
    total = v.c
    for first in range(0, _TERMS, count):
        exact = Fraction(total) + _exact(v, first, count) if math.isfinite(total) else None
        if exact is not None:
            total = _rounded(exact) if exact else 0.0
    return total


def _rounded_products(v: Operands) -> float:
    total = v.c
    for a, b in zip(v.a, v.b, strict=True):
        total = _add(total, _product(a, b))
    return total


def _pairwise(v: Operands) -> float:
    level = [_product(a, b) for a, b in zip(v.a, v.b, strict=True)]
    while len(level) > 1:
        level = [_add(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return _add(v.c, level[0])


def _aligned(v: Operands) -> float:
    """Products and the sum, cut off at a grid of 25 bits below the greatest exponent, added as integers."""
    terms = [Fraction(a) * Fraction(b) for a, b in zip(v.a, v.b, strict=True)] + [Fraction(v.c)]
    sizes = [abs(term) for term in terms if term]
    if not sizes:
        return 0.0
    top = max(size.numerator.bit_length() - size.denominator.bit_length() for size in sizes)
    grid = Fraction(2) ** (top - 25)
    exact = sum(((term / grid).__trunc__() for term in terms), start=0) * grid
    return _rounded(exact, is_cut=True) if exact else 0.0


def _narrow(v: Operands, bits: int) -> Operands:
    def cut(x: float) -> float:
        return x if x == 0 else _rounded(Fraction(x), bits=bits)

    return Operands(tuple(map(cut, v.a)), tuple(map(cut, v.b)), v.c)


def _flushed(v: Operands) -> Operands:
    def flush(x: float) -> float:
        return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x

    return Operands(tuple(map(flush, v.a)), tuple(map(flush, v.b)), flush(v.c))


def _wide(v: Operands) -> float:
    exact = _exact(v) + Fraction(v.c)
    return _rounded(exact) if exact else 0.0


def _double(v: Operands) -> float:
    """A chain of fma in binary64 (no term of the vectors leaves its range), rounded once more at the end."""
    total = Fraction(v.c)
    for k in range(_TERMS):
        exact = total + Fraction(v.a[k]) * Fraction(v.b[k])
        total = Fraction(_rounded_to_double(exact)) if exact else Fraction(0)
    return _rounded(total) if total else 0.0


def _rounded_to_double(exact: Fraction) -> Fraction:
    size = abs(exact)
    shift = size.numerator.bit_length() - size.denominator.bit_length() - 53
    while size / Fraction(2) ** shift >= 1 << 53:
        shift += 1
    made = round(size / Fraction(2) ** shift) * Fraction(2) ** shift
    return -made if exact < 0 else made


_UP = tuple(range(_TERMS))
ORDERS: dict[str, Callable[[Operands], float]] = {
    CANONICAL: lambda v: _chain(_flushed(v), _UP, _flushed(v).c),
    "fma, descending": lambda v: _chain(_flushed(v), _UP[::-1], _flushed(v).c),
    "fma from zero, then the sum": lambda v: _add(_flushed(v).c, _chain(_flushed(v), _UP, 0.0)),
    "fma in two halves": lambda v: _add(
        _chain(_flushed(v), _UP[:4], _flushed(v).c), _chain(_flushed(v), _UP[4:], 0.0)
    ),
    "fma of even and odd terms": lambda v: _add(
        _chain(_flushed(v), _UP[::2], _flushed(v).c), _chain(_flushed(v), _UP[1::2], 0.0)
    ),
    "rounded products, ascending": lambda v: _rounded_products(_flushed(v)),
    "rounded products, pairwise": lambda v: _pairwise(_flushed(v)),
    "exact pairs, ascending": lambda v: _in_groups(_flushed(v), 2),
    "exact fours, ascending": lambda v: _in_groups(_flushed(v), 4),
    "exact, rounded once": lambda v: _wide(_flushed(v)),
    "exact products, then the sum": lambda v: _add(_flushed(v).c, _wide(_flushed(v)._replace(c=0.0))),
    "fma in double precision": lambda v: _double(_flushed(v)),
    "aligned and cut off": lambda v: _aligned(_flushed(v)),
    "fma, ascending, toward zero": lambda v: _chain(_flushed(v), _UP, _flushed(v).c, is_cut=True),
    "fma, ascending, subnormals kept": lambda v: _chain(v, _UP, v.c, keeps_subnormals=True),
    "fma, ascending, operands of 11 bits": lambda v: _chain(_narrow(_flushed(v), 11), _UP, _flushed(v).c),
    "fma, ascending, operands of 8 bits": lambda v: _chain(_narrow(_flushed(v), 8), _UP, _flushed(v).c),
}
"""What each gives for one sum; all but one flush subnormal operands and results."""


# --- operands -----------------------------------------------------------------------------------------


def _drawn(number: int, spread: int) -> Operands:
    words = philox_words(0x5E7, number, 3, 2 * _TERMS + 1)

    def value(word: int) -> float:
        """24 bits, a sign, and an exponent out of `spread`."""
        fraction = ((int(word) >> 8) | 0x800000) / (1 << 24)
        return math.ldexp(fraction if word & 1 else -fraction, (int(word) >> 1 & 0x7F) % spread)

    values = [value(int(word)) for word in words]
    return Operands(tuple(values[:_TERMS]), tuple(values[_TERMS : 2 * _TERMS]), values[-1])


def _alone(a: float, b: float, c: float, others: tuple[float, float] = (-0.0, 1.0)) -> Operands:
    """One product; the others are -0, which changes no sum."""
    rest = _TERMS - 1
    return Operands((a, *[others[0]] * rest), (b, *[others[1]] * rest), c)


_TINY, _SMALL = 2.0**-126, 2.0**-130
VECTORS: tuple[Operands, ...] = (
    *(_drawn(number, 1 + number % 6) for number in range(24)),
    _alone(_TINY, -0.5, 0.0),  # a result below the smallest normal number: -0
    _alone(_SMALL, 2.0**20, 0.0),  # an operand below it
    _alone(1.0, 1.0, _SMALL),  # a sum below it
    _alone(_SMALL, 1.0, _SMALL),
    # In the chain's order the sum passes 2^128 and stays infinite.
    Operands((2.0**127, 2.0**127, -(2.0**127), -(2.0**127), *[-0.0] * 4), (1.0,) * _TERMS, 0.0),
    # What is lost below 2^24, unless a wider sum keeps it.
    Operands((2.0**24, 1.0, 1.0, 1.0, -(2.0**24), 1.0, 1.0, -0.0), (1.0,) * _TERMS, 0.0),
    Operands((2.0**60, 1.0, -(2.0**60), 1.0, *[-0.0] * 4), (1.0,) * _TERMS, 0.0),
    Operands((1.0,) * _TERMS, (1.0,) * _TERMS, 2.0**24),
    Operands((1.0, *[2.0**-24] * 7), (1.0,) * _TERMS, 1.0),
)
"""Sums that tell every two of `ORDERS` apart."""


@cache
def expected(order: str) -> tuple[int, ...]:
    """Return the bits that an order gives for each of `VECTORS`."""
    return tuple(_bits(ORDERS[order](operands)) for operands in VECTORS)


def classify(found: Sequence[Sequence[int]]) -> str:
    """Return the order whose bits these are.

    Args:
        found: for each of `VECTORS`, the bits of every element of the matrix that computed it.

    Returns:
        A name of `ORDERS`; `UNKNOWN` where it is none of them, or where elements differ.
    """
    if any(len(set(elements)) != 1 for elements in found):
        return UNKNOWN
    bits = tuple(_NAN if elements[0] & 0x7FFFFFFF > 0x7F800000 else elements[0] for elements in found)
    return next((order for order in ORDERS if expected(order) == bits), UNKNOWN)


def _bits(value: float) -> int:
    return _NAN if math.isnan(value) else int.from_bytes(struct.pack("<f", value), "little")
