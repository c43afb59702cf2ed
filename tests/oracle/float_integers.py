"""The forward's float operators evaluated with integers alone, from docs/numerics.md (sections 2 to 9, 11.3).

Floats are the 32 bits of `oracle.softfloat`, rows are lists of them. Shares nothing with the
native code, so a mistake that the scalar reference and the kernels have in common cannot hide.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oracle.softfloat import (
    MINUS_ZERO,
    ONE,
    ZERO,
    add,
    divide,
    fma,
    from_int,
    is_less,
    multiply,
    negate,
    root,
    subtract,
    to_int,
)

Row = Sequence[int]
TWO, MINUS_TWO, MINUS_HALF = 0x40000000, 0xC0000000, 0xBF000000
_88, _MINUS_87 = 0x42B00000, 0xC2AE0000


# --- section 2 -----------------------------------------------------------------------------------


def chain(a: Row, b: Row) -> int:
    """p = fma(a_k, b_k, p) from +0."""
    p = ZERO
    for left, right in zip(a, b, strict=True):
        p = fma(left, right, p)
    return p


def c128(a: Row, b: Row) -> int:
    """The one reduction."""
    return folded(chain(a[at : at + 128], b[at : at + 128]) for at in range(0, len(a), 128))


def folded(parts) -> int:
    """The first part, then y + p."""
    y = None
    for p in parts:
        y = p if y is None else add(y, p)
    assert y is not None, "a sum of nothing"
    return y


def total(values: Row) -> int:
    """A chain of additions from +0."""
    p = ZERO
    for value in values:
        p = add(p, value)
    return p


def maximum(values: Row) -> int:
    """The greatest, plus +0."""
    most = values[0]
    for value in values[1:]:
        most = value if is_less(most, value) else most
    return add(most, ZERO)


def at_most(a: int, b: int) -> int:
    return a if is_less(a, b) else b


# --- section 3 -----------------------------------------------------------------------------------


def exp(x: int) -> int:
    if is_less(x, _MINUS_87):
        return ZERO
    n = subtract(fma(x, 0x3FB8AA3B, 0x4B400000), 0x4B400000)
    r = fma(n, 0xB5BFBE8E, fma(n, 0xBF317200, x))
    p = 0x3AB5639D
    for c in (0x3C091EF0, 0x3D2AAC2C, 0x3E2AAA46, 0x3EFFFFFE, ONE, ONE):
        p = fma(p, r, c)
    return p + to_int(n) * 2**23


def log(x: int) -> int:
    e = (x - 0x3F3504F3) >> 23
    m, n = x - e * 2**23, from_int(e)
    f = subtract(m, ONE)
    z = multiply(f, f)
    p = 0x3D5AC715
    for c in (
        0xBDDF91EC, 0x3DF7F82E, 0xBE0081F1, 0x3E1181B7, 0xBE2A978C, 0x3E4CD2A0, 0xBE800038, 0x3EAAAAA4
    ):  # fmt: skip
        p = fma(p, f, c)
    t = multiply(multiply(z, f), p)
    t = fma(n, 0x35BFBE8E, t)
    t = fma(z, MINUS_HALF, t)
    return fma(n, 0x3F317200, add(f, t))


def silu_exp(x: int) -> int:
    """The exponential in silu(x)."""
    return exp(at_most(negate(x), _88))


def gelu_exp(x: int) -> int:
    """The exponential in gelu_tanh(x)."""
    w = fma(multiply(x, x), 0xBD922279, 0xBFCC422A)
    return exp(at_most(multiply(x, w), _88))


def silu(x: int) -> int:
    return divide(x, add(ONE, silu_exp(x)))


def gelu(x: int) -> int:
    return divide(x, add(ONE, gelu_exp(x)))


def tanh(x: int) -> int:
    sign, a = x & MINUS_ZERO, x & ~MINUS_ZERO
    if is_less(a, 0x3F200000):
        z = multiply(a, a)
        p = 0xBBBA8671
        for c in (0x3CA8FC67, 0xBD5C1AD2, 0x3E08837B, 0xBEAAAA99):
            p = fma(p, z, c)
        return sign | fma(multiply(p, z), a, a)
    e = exp(multiply(a, MINUS_TWO))
    return sign | divide(subtract(ONE, e), add(ONE, e))


FUNCTIONS: dict[str, Callable[[int], int]] = {
    "exp": exp,
    "log": log,
    "silu": silu,
    "gelu": gelu,
    "tanh": tanh,
}


# --- sections 5 to 7 and 9 -----------------------------------------------------------------------


def inverse_root(x: Row, eps: int) -> int:
    """1 / sqrt(mean square + eps)."""
    mean = divide(c128(x, x), from_int(len(x)))
    return divide(ONE, root(add(mean, eps)))


def norm(x: Row, weight: Row, eps: int) -> list[int]:
    inverse = inverse_root(x, eps)
    return [multiply(multiply(a, inverse), w) for a, w in zip(x, weight, strict=True)]


def rope(x: Row, cosines: Row, sines: Row) -> list[int]:
    """One head."""
    half = len(x) // 2
    first, second = [], []
    for x1, x2, cosine, sine in zip(x[:half], x[half:], cosines, sines, strict=True):
        first.append(fma(x1, cosine, negate(multiply(x2, sine))))
        second.append(fma(x2, cosine, multiply(x1, sine)))
    return first + second


def softcap(x: int, cap: int) -> int:
    return multiply(cap, tanh(divide(x, cap)))


# --- section 8 -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Attention:
    """The constants of one layer, as bits; a softcap of None is none."""

    scale: int
    window: int | None = None
    cap: int | None = None

    def sees(self, query: int, key: int) -> bool:
        return key <= query and (self.window is None or query - key < self.window)

    def scaled(self, q: Row, k: Row) -> int:
        """A dot product times the scale, before any softcap."""
        return multiply(c128(q, k), self.scale)

    def score(self, q: Row, k: Row) -> int:
        x = self.scaled(q, k)
        return x if self.cap is None else softcap(x, self.cap)


def attention(
    layer: Attention, position: int, q: Row, keys: Sequence[Row], values: Sequence[Row]
) -> tuple[list[int], int, int]:
    """Output, m and l of one query of one head; keys and values by position."""
    m = l = ZERO  # noqa: E741 - the page's name
    o: list[int] = []
    for block in range(0, position + 1, 128):
        seen = [j for j in range(block, min(block + 128, len(keys))) if layer.sees(position, j)]
        if not seen:
            continue
        scores = [layer.score(q, keys[j]) for j in seen]
        m_b = maximum(scores)
        p = [exp(subtract(s, m_b)) for s in scores]
        l_b = total(p)
        o_b = [chain(p, [values[j][c] for j in seen]) for c in range(len(values[0]))]
        if not o:
            m, l, o = m_b, l_b, o_b  # noqa: E741
            continue
        larger = maximum([m, m_b])
        a, b = exp(subtract(m, larger)), exp(subtract(m_b, larger))
        l = fma(l, a, multiply(l_b, b))  # noqa: E741
        o = [fma(old, a, multiply(new, b)) for old, new in zip(o, o_b, strict=True)]
        m = larger
    return [divide(c, l) for c in o], m, l


# --- section 11.3 --------------------------------------------------------------------------------


def log_normaliser(x: Row) -> int:
    m = maximum(x)
    e = [exp(subtract(value, m)) for value in x]
    return add(m, log(folded(total(e[at : at + 128]) for at in range(0, len(e), 128))))


def token_weights(x: Row, temperature: int) -> list[int]:
    m = maximum(x)
    two_to_32 = from_int(2**32)
    return [to_int(multiply(exp(divide(subtract(value, m), temperature)), two_to_32)) for value in x]
