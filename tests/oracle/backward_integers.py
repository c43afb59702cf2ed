"""The backward operators evaluated with integers alone, from docs/numerics.md, section 12."""

from __future__ import annotations

from collections.abc import Sequence

from oracle.float_integers import (
    MINUS_TWO,
    TWO,
    Attention,
    Row,
    at_most,
    c128,
    chain,
    exp,
    folded,
    gelu_exp,
    inverse_root,
    silu_exp,
)
from oracle.softfloat import MINUS_ZERO, ONE, add, divide, fma, from_int, multiply, negate, subtract


def norm(dy: Row, x: Row, weight: Row, eps: int) -> list[int]:
    inverse = inverse_root(x, eps)
    g = [multiply(d, w) for d, w in zip(dy, weight, strict=True)]
    c = divide(multiply(c128(g, x), inverse), from_int(len(x)))
    return [
        multiply(fma(negate(multiply(a, inverse)), c, upstream), inverse)
        for a, upstream in zip(x, g, strict=True)
    ]


def rope(dy: Row, cosines: Row, sines: Row) -> list[int]:
    """One head."""
    half = len(dy) // 2
    first, second = [], []
    for d1, d2, cosine, sine in zip(dy[:half], dy[half:], cosines, sines, strict=True):
        first.append(fma(d1, cosine, multiply(d2, sine)))
        second.append(fma(d2, cosine, negate(multiply(d1, sine))))
    return first + second


def gate(name: str, dy: int, x: int, up: int) -> tuple[int, int]:
    """Gradients of gate and up; the name is silu or gelu."""
    e = silu_exp(x) if name == "silu" else gelu_exp(x)
    d = add(ONE, e)
    a, r = divide(x, d), divide(ONE, d)
    q = multiply(e, r)
    if name == "silu":
        f = fma(a, q, r)
    else:
        n = fma(at_most(multiply(x, x), 0x43000000), 0x3E5B33B6, 0x3FCC422A)
        f = fma(multiply(a, q), n, r)
    return multiply(multiply(dy, up), f), multiply(dy, a)


def tanh_slope(x: int) -> int:
    e = exp(multiply(x & ~MINUS_ZERO, MINUS_TWO))
    u = divide(TWO, add(ONE, e))
    return multiply(multiply(e, u), u)


def softcap(dy: int, x: int, cap: int) -> int:
    return multiply(dy, tanh_slope(divide(x, cap)))


def part(weights: Row, vectors: Sequence[Row]) -> list[int]:
    """One chain per channel."""
    return [chain(weights, column) for column in zip(*vectors, strict=True)]


class SequenceBackward:
    """One sequence and the query heads of one KV head; every list goes by position.

    Args:
        q, dy, out: by head of the group, then position: a row of channels.
        m, l: by head of the group, then position.
    """

    def __init__(
        self,
        layer: Attention,
        q: Sequence[Sequence[Row]],
        keys: Sequence[Row],
        values: Sequence[Row],
        dy: Sequence[Sequence[Row]],
        out: Sequence[Sequence[Row]],
        m: Sequence[Row],
        l: Sequence[Row],  # noqa: E741 - the page's name
    ) -> None:
        self.layer, self.q, self.keys, self.values = layer, q, keys, values
        self.dy, self.out, self.m, self.l = dy, out, m, l
        self._pairs: dict[tuple[int, int, int], tuple[int, int]] = {}

    def dq(self, head: int, i: int) -> list[int]:
        parts = []
        for block in self._blocks():
            seen = [j for j in block if self.layer.sees(i, j)]
            if seen:
                weights = [self._pair(head, i, j)[1] for j in seen]
                parts.append(part(weights, [self.keys[j] for j in seen]))
        return [multiply(folded(p), self.layer.scale) for p in zip(*parts, strict=True)]

    def dk(self, j: int) -> list[int]:
        return [multiply(y, self.layer.scale) for y in self._over_queries(j, 1, self.q)]

    def dv(self, j: int) -> list[int]:
        return self._over_queries(j, 0, self.dy)

    def _over_queries(self, j: int, which: int, vectors: Sequence[Sequence[Row]]) -> list[int]:
        parts = []
        for head in range(len(self.q)):
            for block in self._blocks():
                seen = [i for i in block if self.layer.sees(i, j)]
                if seen:
                    weights = [self._pair(head, i, j)[which] for i in seen]
                    parts.append(part(weights, [vectors[head][i] for i in seen]))
        return [folded(p) for p in zip(*parts, strict=True)]

    def _blocks(self) -> list[range]:
        n = len(self.keys)
        return [range(at, min(at + 128, n)) for at in range(0, n, 128)]

    def _pair(self, head: int, i: int, j: int) -> tuple[int, int]:
        """P and dS."""
        known = self._pairs.get((head, i, j))
        if known is not None:
            return known
        layer, q, dy = self.layer, self.q[head][i], self.dy[head][i]
        delta = c128(dy, self.out[head][i])
        score = layer.score(q, self.keys[j])
        p = divide(exp(subtract(score, self.m[head][i])), self.l[head][i])
        ds = multiply(p, subtract(c128(dy, self.values[j]), delta))
        if layer.cap is not None:
            ds = multiply(ds, tanh_slope(divide(layer.scaled(q, self.keys[j]), layer.cap)))
        self._pairs[head, i, j] = p, ds
        return p, ds
