"""Operands on which an fma made of float64 rounds twice, for the operators of training.

The middles are those of `cases_rounding`. Silu, gelu, softcap and the loss have no case: their fma
meet no middle (docs/numerics.md, 15).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases_backward import TrainingCase
from mens_core.conformance.cases_rounding import ODD, QUARTERS, T, U, encode, pairs, squares
from mens_core.conformance.inputs import Floats, floats, stored_float
from mens_core.ops import AttentionSpec, Batch, Format, StoredTensor
from mens_core.training_ops import AdamW, TrainingOps

__all__ = ["BACKWARD_ROUNDING", "UPDATE_ROUNDING"]

Arrays = Iterator[npt.NDArray[Any]]

F32 = np.float32
_FORMATS: tuple[Format, ...] = ("f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")
_WIDTHS = (9, 128, 131)
"""Of chains: a vector's body, its tail, and the last places of a chunk and of the next one."""


def _chains(width: int) -> tuple[Floats, Floats]:
    """Factors of chains [n, width] that meet a middle at many places, or at the last ones of a long one."""
    a, b = pairs(width)
    return (a, b) if width < 10 else (a[-16:], b[-16:])


# --- products ------------------------------------------------------------------------------------------


def _linear_backward(ops: TrainingOps) -> Arrays:
    for width in _WIDTHS:
        a, b = _chains(width)
        matrix = ops.load_matrix(stored_float(np.ascontiguousarray(b.T)))
        for rows in (len(a), 1):
            yield ops.to_host(ops.linear_backward(ops.from_host(a[:rows].copy()), matrix, name="rounding"))


def _linear_backward_of(format_: Format, ops: TrainingOps) -> Arrays:
    """Rows of ones and of fives: five times a significand that ends in 10 is a middle."""
    columns = 256 if format_.endswith("_k") else 32
    raw = _all(format_, 1) + _all(format_, 5)
    matrix = ops.load_matrix(StoredTensor("rounding", format_, (2, columns), memoryview(raw)))
    dy = np.array([[sign * 2.0**-60, 1 + m * 2.0**-22] for m in (1, 3, 5, 7) for sign in (1, -1)], F32)
    yield ops.to_host(ops.linear_backward(ops.from_host(dy), matrix, name="rounding"))


def _all(format_: Format, value: int) -> bytes:
    """A row of one block, or of 32 numbers, that all are `value`, which is 1 or 5."""
    one = np.array(1, "<f2").tobytes()
    if format_ == "f16":
        return np.full(32, value, "<f2").tobytes()
    if format_ == "bf16":
        return (np.full(32, value, "<f4").view("<u4") >> np.uint32(16)).astype("<u2").tobytes()
    if format_ == "q6_k":  # codes from -32: the upper two bits of both are 10
        return bytes([0x11 * value]) * 128 + bytes([0xAA]) * 64 + bytes([1]) * 16 + one
    if format_.endswith("_k"):  # scales 1, minima 0
        scales = bytes([1] * 4 + [0] * 4 + [1] * 4)
        high = bytes(32) if format_ == "q5_k" else b""
        return one + bytes(2) + scales + high + bytes([0x11 * value]) * 128
    return encode(format_, np.full(32, value))


def _example_products(ops: TrainingOps) -> Arrays:
    for width in _WIDTHS:
        a, b = (ops.from_host(np.ascontiguousarray(x.T)) for x in _chains(width))
        few = ops.from_host(np.ascontiguousarray(_chains(width)[0].T[:, :3]))
        starts = np.array([0, width], np.int32)
        for left, right in ((a, b), (few, b), (b, few)):
            for made in ops.example_products(left, right, starts, name="rounding"):
                yield ops.to_host(made)


def _sum_of_squares(ops: TrainingOps) -> Arrays:
    for width in (2, 130):
        for row in squares(width)[-12:]:
            total = ops.sum_of_squares(ops.from_host(row[None].copy()), name="rounding")
            yield np.asarray(total, F32).reshape(1)


# --- norms and rotation ------------------------------------------------------------------------------


def _norm_operands(width: int) -> Iterator[tuple[Floats, Floats, float]]:
    """Yield x, dy and eps: middles in the squares, in the sum of products, and in the difference.

    With eps 1 and x below 2^-13 the root is 1, so that c and n are what they are made of.
    """
    x = squares(width)
    yield x, floats(231, *x.shape, span=1, binades=4), 9.999999974752427e-07
    x, dy = (np.zeros((2 * width - 2, width), F32) for _ in range(2))
    for k in range(1, width):
        for row, second, sign in ((2 * k - 2, T, 1), (2 * k - 1, U, -1)):
            x[row, k - 1], dy[row, k - 1] = 2.0**-22, sign * 2.0**-52
            x[row, k], dy[row, k] = T * F32(2.0**-14), second
    yield x, dy, 1.0
    x, dy = (np.zeros((2 * width - 2, width), F32) for _ in range(2))
    for k in range(1, width):
        for row, second, sign in ((2 * k - 2, T, -1), (2 * k - 1, U, 1)):
            x[row, 0], dy[row, 0] = 2.0**-20, F32(width) * T
            x[row, k], dy[row, k] = second * F32(2.0**-20), sign * 2.0**-100
    yield x, dy, 1.0


def _rms_norm_backward(ops: TrainingOps) -> Arrays:
    for width in (4, 8, 24):
        w = ops.load_vector(stored_float(np.ones(width, F32)))
        for x, dy, eps in _norm_operands(width):
            yield ops.to_host(
                ops.rms_norm_backward(ops.from_host(dy), ops.from_host(x), w, eps, name="rounding")
            )


def _head_norm_backward(ops: TrainingOps) -> Arrays:
    for width in (4, 16):
        w = ops.load_vector(stored_float(np.ones(width, F32)))
        for x, dy, eps in _norm_operands(width):
            of_dy, of_x = (ops.from_host(np.concatenate([part, part[::-1]], axis=1)) for part in (dy, x))
            yield ops.to_host(ops.head_norm_backward(of_dy, of_x, w, 2, eps, name="rounding"))


def _rope_backward(ops: TrainingOps) -> Arrays:
    positions = np.arange(1, 13, dtype=np.int32)
    table = ops.rotary_table([(1 << 128) // (7 + 13 * i) for i in range(12)], None)
    big = np.tile(QUARTERS, (12, 2))
    tiny = np.full((12, 12), 2.0**-60, F32)
    tiny[:, ::2] *= -1
    for halves in ((big, tiny), (tiny, big)):
        dy = ops.from_host(np.concatenate(halves, axis=1))
        yield ops.to_host(ops.rope_backward(dy, 1, table, positions, name="rounding"))


# --- attention -----------------------------------------------------------------------------------------

_HEADS, _WIDTH = 16, 8
_TINY = (2.0**-60 * np.where(np.arange(_WIDTH) % 2, 1, -1)).astype(F32)
_FIVES = np.tile(QUARTERS, 2)[:_WIDTH]


def _dot_products(ops: TrainingOps) -> Arrays:
    """Middles in q k, in dy v and in delta, of one head: two positions, of which the second looks back."""
    a, b = pairs(_WIDTH)
    some, zero = floats(232, 2, _WIDTH), np.zeros(_WIDTH, F32)
    for x, y in zip(a, b, strict=True):
        yield from _attention(ops, 1, np.stack([x, x]), np.stack([zero, y]), some, some[::-1].copy())
        yield from _attention(ops, 1, some, some[::-1].copy(), np.stack([zero, y]), np.stack([x, x]))
        # Equal scores: out is half of twice y, so that only delta is a middle for the second key.
        yield from _attention(ops, 1, some, np.zeros_like(some), np.stack([y * 2, zero]), np.stack([x, x]))


def _weighted_sums(ops: TrainingOps) -> Arrays:
    """A tiny first term, then a fivefold: in dq by the keys, in dk by the queries, in dv by dy."""
    scores = np.abs(floats(233, _HEADS, span=1)) + F32(0.125)
    some = floats(234, 3, _HEADS, _WIDTH)

    def zeros() -> Floats:
        return np.zeros((3, _HEADS, _WIDTH), F32)

    q, k = zeros(), zeros()
    q[:, :, 0] = scores
    k[0], k[1], k[1, :, 0] = _TINY, _FIVES, -1
    yield from _attention(ops, _HEADS, q[:2], k[:2], some[:2], some[1:])
    q, k = zeros(), zeros()
    q[1], q[2], q[2, :, 0] = _TINY, _FIVES, scores
    k[2, :, 0] = -1
    yield from _attention(ops, _HEADS, q, k, some, some[::-1].copy())
    dy = zeros()
    dy[0], dy[1] = _TINY, _FIVES
    q, k = zeros(), zeros()
    q[:, :, 0], k[1, :, 0] = scores, -1
    yield from _attention(ops, _HEADS, q[:2], k[:2], some[:2], dy[:2])


def _attention(ops: TrainingOps, heads: int, q: Floats, k: Floats, v: Floats, dy: Floats) -> Arrays:
    """Yield the three gradients of one sequence, each head with keys of its own."""
    rows = len(q)
    spec = AttentionSpec(heads=heads, kv_heads=heads, head_dim=_WIDTH, scale=1.0)
    batch = Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.arange(rows, dtype=np.int32),
        starts=np.array([0, rows], np.int32),
        block_tables=np.array([[0]], np.int32),
        logit_rows=np.array([], np.int32),
    )
    cache = ops.new_kv_cache(layers=1, kv_heads=heads, head_dim=_WIDTH, blocks=1)
    of_q, of_k, of_v, of_dy = (
        ops.from_host(np.ascontiguousarray(x).reshape(rows, -1)) for x in (q, k, v, dy)
    )
    ops.kv_append(cache, 0, of_k, of_v, batch)
    saved = ops.attention_saving(of_q, cache, 0, batch, spec, name="rounding")
    for gradient in ops.attention_backward(of_dy, of_q, saved, cache, 0, batch, spec, name="rounding"):
        yield ops.to_host(gradient)


def _attention_backward(ops: TrainingOps) -> Arrays:
    yield from _dot_products(ops)
    yield from _weighted_sums(ops)


# --- the update ----------------------------------------------------------------------------------------


def _adamw(ops: TrainingOps) -> Arrays:
    """Both moments are middles, and what a gradient adds is far below them, and above zero for v."""
    m = ODD[:26].reshape(2, 13)
    is_above_even = (np.arange(26) % 2 == 0).reshape(2, 13)
    g = np.where(is_above_even, F32(2.0**-59), F32(-(2.0**-59)))
    v = ODD[:52:2].reshape(2, 13)
    half = float(T) / 2
    by = AdamW(2.0**-10, half, 0.5, half, 0.25, 9.99999993922529e-09, 1.0, 0.5, 0.5)
    made = [ops.from_host(x.copy()) for x in (floats(235, 2, 13), m, v)]
    parameter, of_m, of_v = made
    ops.adamw(parameter, ops.from_host(g), of_m, of_v, by, name="rounding")
    for x in made:
        yield ops.to_host(x)


BACKWARD_ROUNDING: Mapping[str, TrainingCase] = MappingProxyType(
    {
        "rms_norm_backward/rounding": _rms_norm_backward,
        "head_norm_backward/rounding": _head_norm_backward,
        "rope_backward/rounding": _rope_backward,
        "attention_backward/rounding": _attention_backward,
    }
)

UPDATE_ROUNDING: Mapping[str, TrainingCase] = MappingProxyType(
    {
        "linear_backward/f32/rounding": _linear_backward,
        **{f"linear_backward/{f}/rounding": partial(_linear_backward_of, f) for f in _FORMATS},
        "example_products/rounding": _example_products,
        "sum_of_squares/rounding": _sum_of_squares,
        "adamw/rounding": _adamw,
    }
)
