"""Rotary position embeddings in integers: frequencies, and the reference for their sine and cosine.

Pure and free of floats; docs/numerics.md, RoPE, is the same text in words. `frequencies` turns
a model's configuration into fixed-point constants, once; a lane turns those into tables
(`Ops.rotary_table`), and must give the bits of `cos_sin`.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import factorial

import numpy as np
import numpy.typing as npt

from mens_core import fixedpoint
from vox_plugin_api.families.rope import Rope, Yarn

__all__ = ["attention_factor", "cos_sin", "frequencies", "table"]

FREQUENCY_BITS = 128
FACTOR_BITS = 64
_ONE = 1 << FREQUENCY_BITS
TWO_PI_Q125 = 0xC90FDAA22168C234C4C6628B80DC1CD1
"""floor(2 pi * 2^125)"""
SINE_TERMS = tuple(_ONE // factorial(2 * k + 1) for k in range(1, 16))
COSINE_TERMS = tuple(_ONE // factorial(2 * k) for k in range(1, 17))


def frequencies(rope: Rope) -> tuple[int, ...]:
    """Return floor(turns * 2^128) for each of the head_dim / 2 pairs.

    turns_i = theta^(-2 i / head_dim) / (2 pi) times the scaling's factor, a real number.
    """
    return tuple(
        fixedpoint.floor_to_bits(lambda precision, i=i: _turns(rope, i, precision), FREQUENCY_BITS)  # type: ignore[misc]
        for i in range(rope.head_dim // 2)
    )


def attention_factor(rope: Rope) -> tuple[int, int] | None:
    """Return what cosine and sine are multiplied by, as an exact M / 2^64, or None for 1."""
    yarn = rope.scaling
    if not isinstance(yarn, Yarn):
        return None
    if yarn.attention_factor is not None:
        return fixedpoint.from_fraction(yarn.attention_factor, FACTOR_BITS), 1 << FACTOR_BITS
    if yarn.factor <= 1:
        return None

    def magnitude(scale: Fraction, precision: int) -> int:
        tenth = fixedpoint.log(yarn.factor, precision) * scale.numerator // (10 * scale.denominator)
        return tenth + (1 << precision)

    if yarn.mscale and yarn.mscale_all_dim:
        if yarn.mscale == yarn.mscale_all_dim:
            return None
        above, below = yarn.mscale, yarn.mscale_all_dim
        numerator = fixedpoint.floor_to_bits(
            lambda p: (magnitude(above, p) << p) // magnitude(below, p), FACTOR_BITS
        )
    else:
        numerator = fixedpoint.floor_to_bits(lambda p: magnitude(Fraction(1), p), FACTOR_BITS)
    return numerator, 1 << FACTOR_BITS


def cos_sin(frequency: int, position: int, factor: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return the float32 bits of cosine and sine of `position` times `frequency` (turns * 2^128)."""
    angle = position * frequency % _ONE
    octant, rest = divmod(angle, 1 << 125)
    if octant % 2:
        rest = (1 << 125) - rest
    sine, cosine = _reduced_sine_cosine(rest)
    quarter = (octant + 1) // 2 % 4
    if quarter % 2:
        cosine, sine = sine, cosine
    negative_cosine = octant in (2, 3, 4, 5)
    negative_sine = octant >= 4
    multiplier = 1 << FACTOR_BITS if factor is None else (factor[0] << FACTOR_BITS) // factor[1]
    return _round(cosine * multiplier, negative_cosine), _round(sine * multiplier, negative_sine)


def table(
    freqs: Sequence[int], factor: tuple[int, int] | None, positions: range
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return cosines and sines [positions, pairs]; slow (microseconds each), for checking lanes."""
    bits = np.array(
        [[cos_sin(f, position, factor) for f in freqs] for position in positions], dtype=np.uint32
    ).view(np.float32)
    return bits[:, :, 0].copy(), bits[:, :, 1].copy()


def _reduced_sine_cosine(rest: int) -> tuple[int, int]:
    """Sine and cosine, times 2^128, of `rest` / 2^128 turns, at most an eighth."""
    x = 2 * _mulhi(4 * rest, TWO_PI_Q125)
    z = _mulhi(x, x)
    return x - _mulhi(x, _horner(SINE_TERMS, z)), _ONE - _horner(COSINE_TERMS, z)


def _turns(rope: Rope, i: int, precision: int) -> int:
    log_theta = fixedpoint.log(rope.theta, precision)
    power = fixedpoint.exp_negative(log_theta * 2 * i // rope.head_dim, precision)
    turns = (power << precision) // (2 * fixedpoint.pi(precision))
    if rope.scaling is None:
        return turns
    if isinstance(rope.scaling, Yarn):
        return turns * _yarn_share(rope, rope.scaling, i, precision) >> precision
    return turns * rope.scaling.denominator // rope.scaling.numerator


def _yarn_share(rope: Rope, yarn: Yarn, i: int, precision: int) -> int:
    """What remains of frequency i: ramp / factor + (1 - ramp)."""
    one = 1 << precision
    low = max(_yarn_bound(rope, yarn, yarn.beta_fast, precision, up=False), 0)
    high = min(_yarn_bound(rope, yarn, yarn.beta_slow, precision, up=True), (rope.head_dim - 1) << precision)
    # Equal bounds leave no ramp; the published code widens it by a thousandth.
    width = high - low or one // 1000
    ramp = min(max(((i * one - low) << precision) // width, 0), one)
    return ramp * yarn.factor.denominator // yarn.factor.numerator + one - ramp


def _yarn_bound(rope: Rope, yarn: Yarn, rotations: Fraction, precision: int, *, up: bool) -> int:
    """The pair that turns `rotations` times over the original context, rounded when truncating."""

    def pair(p: int) -> int:
        ratio = fixedpoint.log(yarn.original_context / rotations, p) - _log_two_pi(p)
        return (rope.head_dim * ratio << p) // (2 * fixedpoint.log(rope.theta, p))

    if not yarn.truncate:
        return pair(precision)
    floor = fixedpoint.floor_to_bits(pair, 0)
    return (floor + 1 if up else floor) << precision


def _log_two_pi(precision: int) -> int:
    # ln of a rational just below 2 pi; what is cut off is below the last place.
    return fixedpoint.log(Fraction(2 * fixedpoint.pi(precision), 1 << precision), precision)


def _mulhi(a: int, b: int) -> int:
    return a * b >> FREQUENCY_BITS


def _horner(terms: Sequence[int], z: int) -> int:
    """z (t1 - z (t2 - z (t3 - ...))), each product floored to 2^-128."""
    total = 0
    for term in reversed(terms):
        total = _mulhi(z, term - total)
    return total


def _round(magnitude: int, is_negative: bool) -> int:
    """Nearest float32 to magnitude / 2^192, ties to even; below 2^-126 it is +0."""
    excess = magnitude.bit_length() - 24
    if excess > 0:
        kept, rest, half = magnitude >> excess, magnitude & ((1 << excess) - 1), 1 << (excess - 1)
        kept += rest > half or (rest == half and kept & 1)
    else:
        kept = magnitude << -excess
    if kept >> 24:
        kept, excess = kept >> 1, excess + 1
    # kept in [2^23, 2^24) stands for kept * 2^(excess - 192).
    exponent = excess - (FREQUENCY_BITS + FACTOR_BITS) + 23 + 127
    if magnitude == 0 or exponent < 1:
        return 0
    return is_negative << 31 | exponent << 23 | (kept & 0x7FFFFF)
