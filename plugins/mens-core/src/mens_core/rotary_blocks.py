"""Blocks of rotary tables by numpy's integers: for lanes without a native function that makes them.

The same integers as `rotary.cos_sin` (docs/numerics.md, 7.2), for all angles of a block at once: a number
below 2^128 is four 32-bit limbs, the lowest first, each in a uint64 so that products are exact.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_core.ops import BLOCK
from mens_core.rotary import COSINE_TERMS, SINE_TERMS, TWO_PI_Q125

__all__ = ["make_angles"]

Limbs = npt.NDArray[np.uint64]
"""[limbs, angles], each below 2^32 unless a function says otherwise."""

_BITS = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_LIMBS = 4
_UNIT_BITS = 192
"""A magnitude times the multiplier is in units of 2^-192."""


def make_angles(frequencies: npt.NDArray[np.uint64], factor: int, first: int) -> npt.NDArray[np.float32]:
    """Return cosines and sines [128, 2, pairs] of the positions `first` to `first` + 127.

    Args:
        frequencies: [pairs, 2], the low and high half of floor(turns * 2^128).
        factor: the multiplier M, in units of 2^-64, below 2^67.
        first: below 2^31.
    """
    pairs = len(frequencies)
    halves = [frequencies[:, half // 2] >> np.uint64(half % 2 * 32) & _LOW for half in range(_LIMBS)]
    positions = np.arange(first, first + BLOCK, dtype=np.uint64)
    angle = _carried(np.stack([np.multiply.outer(positions, half).reshape(-1) for half in halves]))[:_LIMBS]
    octant = (angle[3] >> np.uint64(29)).astype(np.int64)
    angle[3] &= np.uint64((1 << 29) - 1)
    eighth = _limbs(1 << 125, _LIMBS)
    rest = np.where(octant % 2 == 1, _less(eighth, angle), angle)

    x = _shifted(_mulhi(_shifted(rest, 2), _limbs(TWO_PI_Q125, _LIMBS)), 1)
    z = _mulhi(x, x)
    sine = _less(x, _mulhi(x, _horner(SINE_TERMS, z)))
    # One bit more than 128: cosine is 2^128 itself where the angle is nothing.
    horner = np.concatenate([_horner(COSINE_TERMS, z), np.zeros_like(z[:1])])
    cosine = _less(_limbs(1 << 128, _LIMBS + 1), horner)
    sine = np.concatenate([sine, np.zeros_like(sine[:1])])

    exchanged = np.isin(octant, (1, 2, 5, 6))
    table = np.empty((2, BLOCK * pairs), np.uint32)
    table[0] = _rounded(np.where(exchanged, sine, cosine), factor, (octant >= 2) & (octant <= 5))
    table[1] = _rounded(np.where(exchanged, cosine, sine), factor, octant >= 4)
    by_position = table.reshape(2, BLOCK, pairs).transpose(1, 0, 2)
    return np.ascontiguousarray(by_position).view(np.float32)


def _limbs(number: int, count: int) -> Limbs:
    """One number as a column, to be broadcast."""
    return np.array([[number >> 32 * i & 0xFFFFFFFF] for i in range(count)], np.uint64)


def _carried(sums: Limbs) -> Limbs:
    """Limbs of sums below 2^64 - 2^32 each; one limb more comes out."""
    out = np.empty((len(sums) + 1, *sums.shape[1:]), np.uint64)
    carry = np.zeros_like(sums[0])
    for i, limb in enumerate(sums):
        total = limb + carry
        out[i], carry = total & _LOW, total >> _BITS
    out[-1] = carry
    return out


def _less(a: Limbs, b: Limbs) -> Limbs:
    """a - b, where that is not negative."""
    out = np.empty(np.broadcast_shapes(a.shape, b.shape), np.uint64)
    borrow: npt.NDArray[np.uint64] = np.zeros(out.shape[1:], np.uint64)
    for i in range(len(out)):
        # Below zero it wraps, and the bits above the limb are set.
        difference = a[i] - b[i] - borrow
        out[i], borrow = difference & _LOW, difference >> np.uint64(63)
    return out


def _shifted(a: Limbs, bits: int) -> Limbs:
    """a * 2^bits, which fits."""
    return _carried(a << np.uint64(bits))[: len(a)]


def _product(a: Limbs, b: Limbs) -> Limbs:
    """a * b, all limbs."""
    width = max(a.shape[1], b.shape[1])
    sums = np.zeros((len(a) + len(b), width), np.uint64)
    for i in range(len(a)):
        products = a[i] * b
        sums[i : i + len(b)] += products & _LOW
        sums[i + 1 : i + 1 + len(b)] += products >> _BITS
    return _carried(sums)[:-1]


def _mulhi(a: Limbs, b: Limbs) -> Limbs:
    """floor(a * b / 2^128)."""
    return _product(a, b)[_LIMBS:]


def _horner(terms: tuple[int, ...], z: Limbs) -> Limbs:
    """z (t1 - z (t2 - z (t3 - ...))), each product floored."""
    total = np.zeros_like(z)
    for term in reversed(terms):
        total = _mulhi(z, _less(_limbs(term, _LIMBS), total))
    return total


def _rounded(magnitude: Limbs, factor: int, is_negative: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint32]:
    """Bits of the float32 nearest to magnitude * factor / 2^192, ties to even; +0 below 2^-126."""
    product = _product(magnitude, _limbs(factor, 3))
    each = np.arange(product.shape[1])
    places = np.arange(len(product))[:, None]
    top = np.where(product != 0, places, 0).max(axis=0)
    # A number whose highest limb is the first or second is far too small, and zero whatever is read.
    at = np.maximum(top, 1)
    length = np.frexp(product[top, each].astype(np.float64))[1].astype(np.int64)
    head = product[at, each] << _BITS | product[at - 1, each]
    cut = (np.where(top >= 1, length, 0) + 8).astype(np.uint64)
    kept, rest = head >> cut, head & ((np.uint64(1) << cut) - np.uint64(1))
    half = np.uint64(1) << (cut - np.uint64(1))
    is_more = np.any((places < at - 1) & (product != 0), axis=0)
    up = (rest > half) | ((rest == half) & (is_more | (kept & np.uint64(1) == 1)))
    kept = kept + up.astype(np.uint64)
    # The rounded mantissa may be 2^24: one binade higher, and its 23 bits are zero.
    exponent = 32 * top + length - 24 + (kept >> np.uint64(24)).astype(np.int64) - _UNIT_BITS + 23 + 127
    kept = np.where(kept >> np.uint64(24) == 1, kept >> np.uint64(1), kept)
    bits = (
        is_negative.astype(np.uint64) << np.uint64(31)
        | np.maximum(exponent, 0).astype(np.uint64) << np.uint64(23)
        | kept & np.uint64(0x7FFFFF)
    )
    return np.where((exponent >= 1) & (top >= 1), bits, 0).astype(np.uint32)
