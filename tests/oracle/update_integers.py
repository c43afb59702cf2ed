"""Loss, gradients of parameters and update on integers alone, from docs/numerics.md, section 13.

Floats are bits, as in `oracle.softfloat`; rows are lists of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from mens_core.philox import philox
from oracle.float_integers import Row, chain, exp, folded, log, maximum, total
from oracle.softfloat import ONE, ZERO, add, divide, fma, multiply, root, subtract

Rows = Sequence[Row]


def linear_backward(dy: Row, weight: Rows) -> list[int]:
    """One row of dx."""
    return [_chunked(list(zip(dy, column, strict=True))) for column in zip(*weight, strict=True)]


def example_product(a: Rows, b: Rows) -> list[list[int]]:
    """a^T b over one example's rows."""
    if not a:
        raise ValueError("an example without rows says no widths")
    return [
        [_chunked(list(zip(p, q, strict=True))) for q in zip(*b, strict=True)] for p in zip(*a, strict=True)
    ]


def _chunked(pairs: Sequence[tuple[int, int]]) -> int:
    parts = []
    for at in range(0, len(pairs), 128):
        left, right = zip(*pairs[at : at + 128], strict=True)
        parts.append(chain(left, right))
    return folded(parts)


def embed_backward(dy: Rows, token_ids: Sequence[int], rows: int, width: int) -> list[list[int]]:
    """One example's gradient of a table."""
    made = []
    for token in range(rows):
        taken = [(r, row) for r, row in enumerate(dy) if token_ids[r] == token]
        made.append([_sum_by_position([(r, row[k]) for r, row in taken]) for k in range(width)])
    return made


def example_sum(losses: Row, positions: Sequence[int]) -> int:
    return _sum_by_position(list(zip(positions, losses, strict=True)))


def _sum_by_position(terms: Iterable[tuple[int, int]]) -> int:
    chunks: dict[int, list[int]] = {}
    for position, value in terms:
        chunks.setdefault(position // 128, []).append(value)
    return folded(total(chunks[c]) for c in sorted(chunks)) if chunks else ZERO


def cross_entropy(x: Row, target: int) -> tuple[int, list[int]]:
    m = maximum(x)
    e = [exp(subtract(value, m)) for value in x]
    s = folded(total(e[at : at + 128]) for at in range(0, len(e), 128))
    gradient = [divide(value, s) for value in e]
    gradient[target] = subtract(gradient[target], ONE)
    return subtract(add(m, log(s)), x[target]), gradient


def add_scaled(y: int, x: int, factor: int) -> int:
    return add(y, multiply(x, factor))


def dropout(
    row: Row, rate: Fraction, seed: int, step: int, number: int, position: int, example: int
) -> list[int]:
    threshold, factor = rate.numerator * 2**32 // rate.denominator, nearest(1 / (1 - rate))
    made = []
    for k, x in enumerate(row):
        words = philox(seed, (position, example << 16 | k // 4, 4 | number << 16, step))
        made.append(ZERO if words[k % 4] < threshold else multiply(x, factor))
    return made


def first_value(seed: int, number: int, index: int, columns: int) -> int:
    """Element `index` of a new A, row by row."""
    h = philox(seed, (index // 4, number, 2, 0))[index % 4] >> 8
    return multiply(nearest(Fraction(2 * h + 1 - 2**24, 2**24)), nearest_root(Fraction(1, columns)))


def sum_of_squares(values: Row) -> int:
    return _chunked([(value, value) for value in values])


@dataclass(frozen=True)
class Constants:
    """Of an AdamW step, as bits."""

    rate: int
    beta1: int
    rest1: int
    beta2: int
    rest2: int
    eps: int
    decay: int
    c1: int
    c2: int


def adamw(p: int, g: int, m: int, v: int, by: Constants) -> tuple[int, int, int]:
    m = fma(by.beta1, m, multiply(by.rest1, g))
    v = fma(by.beta2, v, multiply(by.rest2, multiply(g, g)))
    d = add(root(divide(v, by.c2)), by.eps)
    step = divide(divide(m, by.c1), d)
    return subtract(multiply(p, by.decay), multiply(by.rate, step)), m, v


def tree(leaves: Sequence[int]) -> int:
    """Level by level."""
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [add(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def nearest(value: Fraction) -> int:
    """Bits of the float32 nearest to an exact number, ties to even; below 2^-126 it is +0."""
    if value == 0:
        return ZERO
    sign, size = (0x80000000, -value) if value < 0 else (0, value)
    exponent = 0
    while size >= 2:
        size, exponent = size / 2, exponent + 1
    while size < 1:
        size, exponent = size * 2, exponent - 1
    significand = round(size * 2**23)
    if significand == 2**24:
        significand, exponent = 2**23, exponent + 1
    assert exponent <= 127
    return ZERO if exponent < -126 else sign | (exponent + 127) << 23 | (significand - 2**23)


def nearest_root(value: Fraction) -> int:
    """Bits of the float32 nearest to a square root."""
    scaled = value * 4**200
    floor = isqrt(scaled.numerator // scaled.denominator)
    # A half unit more, unless the root is exact: it can't be a tie then, and neither can its marker.
    return nearest(Fraction(2 * floor + (floor * floor != scaled), 2**201))


def round_bfloat16(bits: int) -> int:
    """The 16 bits of the nearest bfloat16, ties to even; a subnormal is zero of its sign."""
    if bits >> 23 & 0xFF == 0:
        return bits >> 31 << 15
    kept, rest = bits >> 16, bits & 0xFFFF
    return kept + (rest > 0x8000 or (rest == 0x8000 and kept % 2 == 1))
