"""IEEE 754 binary32 on Python integers, rounded once to nearest even, subnormals flushed.

A float is its 32 bits. No floating-point operation takes part, neither Python's nor a
library's: a number is a sign, an integer and a power of two.
"""

from __future__ import annotations

from math import isqrt

__all__ = [
    "INFINITY",
    "MINUS_ZERO",
    "NAN",
    "ONE",
    "ZERO",
    "BetweenLanesError",
    "add",
    "divide",
    "fma",
    "from_int",
    "is_less",
    "multiply",
    "negate",
    "root",
    "subtract",
    "to_int",
]

ZERO, MINUS_ZERO, ONE = 0x00000000, 0x80000000, 0x3F800000
INFINITY, NAN = 0x7F800000, 0x7FC00000
_SIGN, _MAGNITUDE = 0x80000000, 0x7FFFFFFF
_HIDDEN = 1 << 23


class BetweenLanesError(ArithmeticError):
    """An exact result in [2^-126 (1 - 2^-25), 2^-126), where x86 and Arm flush differently."""


def add(a: int, b: int) -> int:
    return fma(a, ONE, b)


def subtract(a: int, b: int) -> int:
    return fma(a, ONE, negate(b))


def multiply(a: int, b: int) -> int:
    sign = (a ^ b) & _SIGN
    if _is_special(a) or _is_special(b):
        if _is_nan(a) or _is_nan(b) or _is_zero(a) or _is_zero(b):
            return NAN
        return sign | INFINITY
    m, e = _integer(a)
    n, f = _integer(b)
    return _rounded(sign, m * n, e + f)


def fma(a: int, b: int, c: int) -> int:
    """a * b + c, rounded once."""
    sign = (a ^ b) & _SIGN
    if _is_special(a) or _is_special(b) or _is_special(c):
        return _special_fma(a, b, c, sign)
    m, e = _integer(a)
    n, f = _integer(b)
    product, exponent = m * n, e + f
    other, other_exponent = _integer(c)
    if product == 0 and other == 0:
        return sign & c & _SIGN
    lowest = min(exponent, other_exponent)
    total = (-product if sign else product) << (exponent - lowest)
    total += (-other if c & _SIGN else other) << (other_exponent - lowest)
    if total == 0:
        return ZERO  # an exact cancellation
    return _rounded(_SIGN if total < 0 else 0, abs(total), lowest)


def divide(a: int, b: int) -> int:
    sign = (a ^ b) & _SIGN
    if _is_nan(a) or _is_nan(b) or (_is_special(a) and _is_special(b)) or (_is_zero(a) and _is_zero(b)):
        return NAN
    if _is_special(a) or _is_zero(b):
        return sign | INFINITY
    if _is_special(b) or _is_zero(a):
        return sign
    m, e = _integer(a)
    n, f = _integer(b)
    quotient, rest = divmod(m << 40, n)
    # One bit more, that says whether the division left a rest.
    return _rounded(sign, quotient << 1 | (rest != 0), e - f - 41)


def root(a: int) -> int:
    """Square root."""
    if _is_zero(a):
        return a & _SIGN
    if a & _SIGN or _is_nan(a):
        return NAN
    if _is_special(a):
        return INFINITY
    m, e = _integer(a)
    m, e = (m << 41, e - 41) if e % 2 else (m << 40, e - 40)
    floor = isqrt(m)
    return _rounded(0, floor << 1 | (floor * floor != m), e // 2 - 1)


def negate(a: int) -> int:
    """Change the sign, whatever it is of."""
    return a ^ _SIGN


def is_less(a: int, b: int) -> bool:
    """a < b; zeros are equal, and nothing is less or more than a NaN."""
    if _is_nan(a) or _is_nan(b):
        return False
    return _ordered(a) < _ordered(b)


def from_int(n: int) -> int:
    """The nearest float."""
    return _rounded(_SIGN if n < 0 else 0, abs(n), 0)


def to_int(a: int) -> int:
    """Round a finite float down to an integer."""
    m, e = _integer(a)
    value = -m if a & _SIGN else m
    return value << e if e >= 0 else value >> -e


def _is_special(a: int) -> bool:
    return a & INFINITY == INFINITY


def _is_nan(a: int) -> bool:
    return a & _MAGNITUDE > INFINITY


def _is_zero(a: int) -> bool:
    return a & _MAGNITUDE < _HIDDEN  # subnormals count as zero


def _integer(a: int) -> tuple[int, int]:
    """m and e of a magnitude m * 2^e."""
    exponent = a >> 23 & 0xFF
    return ((a & 0x7FFFFF) | _HIDDEN, exponent - 150) if exponent else (0, 0)


def _ordered(a: int) -> int:
    if _is_zero(a):
        return 0
    return -(a & _MAGNITUDE) if a & _SIGN else a


def _special_fma(a: int, b: int, c: int, sign: int) -> int:
    if _is_nan(a) or _is_nan(b) or _is_nan(c):
        return NAN
    if _is_special(a) or _is_special(b):
        if _is_zero(a) or _is_zero(b) or (_is_special(c) and c & _SIGN != sign):
            return NAN
        return sign | INFINITY
    return c


def _rounded(sign: int, m: int, e: int) -> int:
    """The float nearest to m * 2^e, ties to even."""
    if m == 0:
        return sign
    exact_m, exact_e = m, e
    surplus = m.bit_length() - 24
    if surplus > 0:
        rest, half = m & ((1 << surplus) - 1), 1 << (surplus - 1)
        m >>= surplus
        m += rest > half or (rest == half and m & 1)
        e += surplus
        if m == 1 << 24:
            m, e = _HIDDEN, e + 1
    else:
        m, e = m << -surplus, e + surplus
    if e > 104:
        return sign | INFINITY
    if exact_e + exact_m.bit_length() <= -126:  # below 2^-126
        if _is_between_lanes(exact_m, exact_e):
            raise BetweenLanesError
        return sign
    return sign | (e + 150) << 23 | (m & 0x7FFFFF)


def _is_between_lanes(m: int, e: int) -> bool:
    edge, shift = (1 << 25) - 1, e + 151  # 2^-126 (1 - 2^-25) is edge * 2^-151
    return m << shift >= edge if shift >= 0 else m >= edge << -shift
