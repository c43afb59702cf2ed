"""The quantised operators evaluated with integers alone, from docs/numerics.md.

A float is a pair of a sign and an exact rational; every operation is exact, then rounded once to
binary32 (nearest, ties to even) by integer comparison, with subnormal inputs and results flushed.
A mistake that the scalar reference and the kernels share cannot hide here.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from oracle.ggml_blocks import BYTES, COLUMNS, parse_block

_SMALLEST = Fraction(1, 2**126)
_OVERFLOW = Fraction(2**128 - 2**103)


class BetweenLanesError(ArithmeticError):
    """An exact result in [2^-126 (1 - 2^-25), 2^-126), where x86 and Arm flush differently."""


@dataclass(frozen=True)
class Float:
    """A finite binary32: `value` with the sign kept for zero."""

    negative: bool
    value: Fraction

    def bits(self) -> int:
        """Return the binary32 encoding."""
        sign = 0x80000000 if self.negative else 0
        if self.value == 0:
            return sign
        size = abs(self.value)
        exponent = _exponent(size)
        return sign | (exponent + 127) << 23 | int(size / Fraction(2) ** (exponent - 23)) - 2**23


def _exponent(size: Fraction) -> int:
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= size else exponent - 1


def _round(exact: Fraction, negative_zero: bool = False) -> Float:
    if exact == 0:
        return Float(negative_zero, exact)
    size = abs(exact)
    if _SMALLEST * (1 - Fraction(1, 2**25)) <= size < _SMALLEST:
        raise BetweenLanesError
    if size >= _OVERFLOW:
        raise OverflowError
    unit = Fraction(2) ** (_exponent(size) - 23)
    rounded = round(size / unit) * unit  # Fraction rounds to nearest, ties to even
    if rounded < _SMALLEST:
        rounded = Fraction(0)
    return Float(exact < 0, -rounded if exact < 0 else rounded)


def from_bits(bits: int) -> Float:
    """Read a binary32; subnormals become zero."""
    negative, exponent, mantissa = bits >> 31 == 1, bits >> 23 & 255, bits & 0x7FFFFF
    if exponent == 0:
        return Float(negative, Fraction(0))
    value = Fraction(2**23 + mantissa) * Fraction(2) ** (exponent - 150)
    return Float(negative, -value if negative else value)


def from_half(bits: int) -> Float:
    """Read a binary16; its subnormals are ordinary numbers in binary32."""
    negative, exponent, mantissa = bits >> 15 == 1, bits >> 10 & 31, bits & 1023
    value = (
        Fraction(mantissa, 2**24)
        if exponent == 0
        else Fraction(1024 + mantissa) * Fraction(2) ** (exponent - 25)
    )
    return Float(negative, -value if negative else value)


def from_int(n: int) -> Float:
    """Convert with one rounding."""
    return _round(Fraction(n))


def multiply(a: Float, b: Float) -> Float:
    return _round(a.value * b.value, a.negative != b.negative)


def divide(a: Float, b: Float) -> Float:
    return _round(a.value / b.value, a.negative != b.negative)


def add(a: Float, b: Float) -> Float:
    return _round(a.value + b.value, a.negative and b.negative)


def subtract(a: Float, b: Float) -> Float:
    return add(a, Float(not b.negative, -b.value))


def fma(a: Float, b: Float, c: Float) -> Float:
    product_is_negative = a.negative != b.negative
    return _round(a.value * b.value + c.value, product_is_negative and c.negative)


ZERO = Float(False, Fraction(0))
_127 = Float(False, Fraction(127))


def quantise(x: list[Float]) -> tuple[Float, list[int]]:
    """Return the scale and the codes of one block of activations."""
    amax = Float(False, max(abs(v.value) for v in x))
    d = divide(amax, _127)
    if d.value == 0:
        return ZERO, [0] * len(x)
    inverse = divide(_127, amax)
    return d, [round(multiply(v, inverse).value) for v in x]


def output(weight_format: str, row: bytes, x: list[int]) -> int:
    """Return the bits of one output: a row of raw blocks times a row of activations, given as bits."""
    columns, size = COLUMNS[weight_format], BYTES[weight_format]
    blocks = [parse_block(weight_format, row[at : at + size]) for at in range(0, len(row), size)]
    quantised = [quantise([from_bits(v) for v in x[at : at + columns]]) for at in range(0, len(x), columns)]
    chunks: list[Float] = []
    for index, (block, (scale, codes)) in enumerate(zip(blocks, quantised, strict=True)):
        if columns == 32:
            total = sum(w * a for w, a in zip(block.codes, codes, strict=True))
            before = ZERO if index % 4 == 0 else chunks.pop()
            chunks.append(fma(multiply(from_half(block.d), scale), from_int(total), before))
            continue
        width = columns // len(block.scales)
        runs = [range(j * width, (j + 1) * width) for j in range(len(block.scales))]
        u = sum(
            s * sum(block.codes[i] * codes[i] for i in run) for s, run in zip(block.scales, runs, strict=True)
        )
        p = fma(multiply(from_half(block.d), scale), from_int(u), ZERO)
        if weight_format != "q6_k":
            v = sum(m * sum(codes[i] for i in run) for m, run in zip(block.mins, runs, strict=True))
            scaled = multiply(from_half(block.dmin), scale)
            p = fma(Float(not scaled.negative, -scaled.value), from_int(v), p)
        chunks.append(p)
    y = chunks[0]
    for chunk in chunks[1:]:
        y = add(y, chunk)
    return y.bits()


def dequantised(weight_format: str, raw: bytes) -> list[int]:
    """Return the bits of one block's weights in float32."""
    block = parse_block(weight_format, raw)
    d, dmin = from_half(block.d), from_half(block.dmin)
    width = len(block.codes) // len(block.scales)
    weights = []
    for i, code in enumerate(block.codes):
        q = from_int(code)
        if len(block.codes) == 32:
            weights.append(multiply(q, d).bits())
            continue
        scaled = multiply(multiply(d, from_int(block.scales[i // width])), q)
        if weight_format != "q6_k":
            scaled = subtract(scaled, multiply(dmin, from_int(block.mins[i // width])))
        weights.append(scaled.bits())
    return weights
