"""Operands and results below 2^-126 in training, as in `cases_flushed`.

A lane that trains takes tensors from the host as they are, so each of its operators can be given some that
hold subnormals; those of serving are in `cases_subnormal`. Left out is what can't be seen: results of
`dropout`, which makes nothing smaller, the squares of subnormals, and `cross_entropy` of logits that are
subnormal beside their own logarithms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases_backward import TrainingCase
from mens_core.conformance.cases_flushed import SMALLEST, small
from mens_core.conformance.cases_subnormal import SUBNORMAL, block_of, great_weights, turned, whole
from mens_core.conformance.inputs import BLOCKS, Floats, stored_float, weight
from mens_core.ops import AttentionSpec, Format, Ints
from mens_core.training_ops import AdamW, DropoutKey, TrainingOps

__all__ = ["BACKWARD_FLUSHED", "UPDATE_FLUSHED"]

Arrays = Iterator[npt.NDArray[Any]]

F32 = np.float32
_FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16", *BLOCKS)


# --- the backward of operators ------------------------------------------------------------------


def _norm_backward(operator: str, ops: TrainingOps) -> Arrays:
    heads = 3 if operator == "head_norm_backward" else 1
    width = 16

    def made(dy: Floats, x: Floats, w: float, eps: float, name: str) -> npt.NDArray[Any]:
        of_dy, of_x = ops.from_host(np.tile(dy, heads)), ops.from_host(np.tile(x, heads))
        vector = ops.load_vector(stored_float(np.full(width, w, F32)))
        if operator == "head_norm_backward":
            return ops.to_host(ops.head_norm_backward(of_dy, of_x, vector, heads, eps, name=name))
        return ops.to_host(ops.rms_norm_backward(of_dy, of_x, vector, eps, name=name))

    # Nine rows: eight side by side, and one.
    one, tiny = small(0, 9, width), small(-130, 9, width)
    # g, which the inverse root would make great again; then a subnormal dy.
    yield made(small(-70, 9, width), small(-50, 9, width), 2.0**-70, SMALLEST, "products")
    yield made(tiny, one, 2.0**60, 0.5, "operands")
    # Squares of x that are flushed; a mean that is small, and an eps that is smaller.
    yield made(one, small(-64, 9, width), 2.0**-20, SMALLEST, "squares")
    few = np.zeros((9, width), F32)
    few[:, :2] = 2.0**-59
    yield made(one, few, 1.0, SMALLEST / 2, "eps")
    # The gradient itself.
    yield made(one, small(30, 9, width)[:, ::-1], 2.0**-100, 0.5, "results")


def _rope_backward(ops: TrainingOps) -> Arrays:
    yield from turned("rope_backward", ops)


def _gate_backward(operator: str, ops: TrainingOps) -> Arrays:
    rows = (
        # dy, gate, up: products that are flushed; an activation that is, and would be great again; operands.
        (small(-70, 37), small(0, 37), small(-70, 37)),
        (small(60, 37), small(-126, 37), small(0, 37)),
        (small(-130, 37), small(3, 37), small(60, 37)),
        (small(60, 37), small(0, 37), small(-130, 37)),
        (np.full(37, SMALLEST, F32), small(0, 37), np.ones(37, F32)),
    )
    dy, gate, up = (ops.from_host(np.stack(column)) for column in zip(*rows, strict=True))
    for gradient in getattr(ops, operator)(dy, gate, up, name="gated"):
        yield ops.to_host(gradient)


def _softcap_backward(ops: TrainingOps) -> Arrays:
    dy = np.full((2, 37), SMALLEST, F32)
    x = ops.from_host(small(5, 2, 37))
    yield ops.to_host(ops.softcap_backward(ops.from_host(dy), x, 30.0, name="results"))
    # A quotient of a subnormal number and a cap that is hardly greater.
    x = ops.from_host(small(-128, 2, 37))
    yield ops.to_host(ops.softcap_backward(ops.from_host(small(0, 2, 37)), x, SMALLEST, name="x"))


_ROWS = 20
"""Enough that a lane may make products over pairs of positions."""


def _attention_backward(ops: TrainingOps) -> Arrays:
    rows = _ROWS
    q, k, v, dy = small(-1, rows, 16), small(-1, rows, 8), small(0, rows, 8), small(0, rows, 16)
    less, great = small(-12, rows, 16), np.abs(small(126, rows, 16))
    for operands, scale in (
        # Scores, gradients and values that are flushed.
        ((np.abs(small(-66, rows, 16)), np.abs(small(-66, rows, 8)), v, dy), 2.0**127),
        ((q, k, v, np.full_like(dy, SMALLEST)), 1.0),
        ((q, k, np.full_like(v, SMALLEST), dy), 1.0),
        ((small(20, rows, 16), small(20, rows, 8), v, small(-110, rows, 16)), 2.0**-42),
        # A scale, queries, keys, values and gradients that are subnormal.
        ((np.abs(small(60, rows, 16)), np.abs(small(60, rows, 8)), v, less), 2.0**-128),
        ((np.abs(small(-128, rows, 16)), great[:, :8], v, less), 1.0),
        ((great, np.abs(small(-128, rows, 8)), v, less), 1.0),
        ((q, k, small(-130, rows, 8), small(100, rows, 16)), 1.0),
        ((q, k, small(100, rows, 8), small(-130, rows, 16)), 1.0),
    ):
        yield from _attended(ops, *operands, scale=scale, softcap=None)


def _attention_softcap_backward(ops: TrainingOps) -> Arrays:
    """Scores over the cap that are flushed; then gradients that are, behind a cap that bends."""
    q, k = np.abs(small(-2, _ROWS, 16)), np.abs(small(-2, _ROWS, 8))
    v, dy = small(0, _ROWS, 8), small(0, _ROWS, 16)
    yield from _attended(ops, q, k, v, dy, scale=0.5, softcap=2.0**127)
    yield from _attended(ops, q, k, v, np.full_like(dy, SMALLEST), scale=8.0, softcap=2.0)


def _attended(
    ops: TrainingOps,
    q: Floats,
    k: Floats,
    v: Floats,
    dy: Floats,
    *,
    scale: float,
    softcap: float | None,
) -> Arrays:
    spec = AttentionSpec(heads=2, kv_heads=1, head_dim=8, scale=scale, softcap=softcap)
    batch = whole(len(q))
    cache = ops.new_kv_cache(layers=1, kv_heads=1, head_dim=8, blocks=1)
    of_q, of_dy = ops.from_host(q), ops.from_host(dy)
    ops.kv_append(cache, 0, ops.from_host(k), ops.from_host(v), batch)
    saved = ops.attention_saving(of_q, cache, 0, batch, spec, name="attention")
    for tensor in (saved.out, saved.m, saved.l):
        yield ops.to_host(tensor)
    for gradient in ops.attention_backward(of_dy, of_q, saved, cache, 0, batch, spec, name="attention"):
        yield ops.to_host(gradient)


# --- gradients of parameters, adapters, the update --------------------------------------------------

_STARTS: Ints = np.array([0, 130, 130, 140], np.int32)
"""Examples of more than a chunk, of nothing and of less than one."""


def _linear_backward(format_: Format, ops: TrainingOps) -> Arrays:
    sizes: tuple[tuple[int, int, int], ...] = (
        (1, 5, 83),
        (3, 131, 88),
        (17, 128, 83),
        (17, 128, 88),
        (17, 128, 40),
    )
    if format_ in BLOCKS:
        sizes = tuple((rows, outputs, block_of(format_)) for rows, outputs, _ in sizes[:3])
    for rows, outputs, columns in sizes:
        matrix = ops.load_matrix(weight(format_, 310, outputs, columns))
        dy = np.zeros((rows, outputs), F32)
        dy[:, -1] = np.ldexp(F32(1), -125 + np.arange(rows) % 3)
        yield ops.to_host(ops.linear_backward(ops.from_host(dy), matrix, name="results"))
        matrix = ops.load_matrix(great_weights(format_, outputs, columns))
        dy = ops.from_host(small(-128, rows, outputs))
        yield ops.to_host(ops.linear_backward(dy, matrix, name="operands"))


def _matrix(ops: TrainingOps) -> Arrays:
    """A weight made of a tensor that holds subnormals."""
    # Of few outputs and of few inputs, as adapters are.
    for outputs, columns in ((5, 83), (130, 83), (20, 88), (20, 40)):
        matrix = ops.matrix(ops.from_host(small(-130, outputs, columns)), name="adapter")
        for rows in (1, 3, 17):
            yield ops.to_host(ops.linear(ops.from_host(small(100, rows, columns)), matrix, name="y"))
        for rows in (3, 17):
            dy = ops.from_host(small(100, rows, outputs))
            yield ops.to_host(ops.linear_backward(dy, matrix, name="dx"))
        ids = np.array([1, 0, 4], np.int32)
        yield ops.to_host(ops.embed(matrix, ids, 2.0**100, name="rows"))


def _example_products(ops: TrainingOps) -> Arrays:
    rows = int(_STARTS[-1])
    for one, two in ((-66, -66), (-130, 100)):
        a = ops.from_host(np.abs(small(one, rows, 9)))
        for width in (39, 40):
            b = ops.from_host(np.abs(small(two, rows, width)))
            for left, right in ((a, b), (b, a)):
                yield from map(ops.to_host, ops.example_products(left, right, _STARTS, name="gradient"))


def _embed_backward(ops: TrainingOps) -> Arrays:
    """Differences that are flushed; subnormals beside numbers that are not."""
    rows = int(_STARTS[-1])
    ids = np.arange(rows, dtype=np.int32) // 2 % 7
    differences, sums = np.abs(small(-126, rows, 19)), np.abs(small(-126, rows, 19))
    differences[1::2], sums[1::2] = -SMALLEST, np.abs(small(-128, rows // 2, 19))
    for dy in (differences, sums):
        yield from map(ops.to_host, ops.embed_backward(ops.from_host(dy), ids, _STARTS, 8, name="gradient"))


def _example_sums(ops: TrainingOps) -> Arrays:
    positions = np.array([1, 2, 130, 1, 2, 3], np.int32)
    starts = np.array([0, 3, 6], np.int32)
    for losses in ([1.5, -1, 0, 1.75, -1, 0], [1, 0.5, 0, 1, 0.5, 0.25]):
        x = ops.from_host((np.array(losses) * SMALLEST).astype(F32))
        yield ops.to_host(ops.example_sums(x, positions, starts))


def _cross_entropy(ops: TrainingOps) -> Arrays:
    """Shares that are flushed: exp(-87) over a sum of 30 or more."""
    logits = np.zeros((2, 37), F32)
    logits[:, ::7] = -87
    for made in ops.cross_entropy(ops.from_host(logits), np.array([1, 7], np.int32), name="loss"):
        yield ops.to_host(made)


def _scale(ops: TrainingOps) -> Arrays:
    for exponent, factor in ((-100, 2.0**-40), (-130, 2.0**100)):
        yield ops.to_host(ops.scale(ops.from_host(small(exponent, 2, 37)), factor, name="scaled"))


def _add_scaled(ops: TrainingOps) -> Arrays:
    zero, tiny = (ops.from_host(x) for x in (np.zeros((2, 37), F32), np.abs(small(-127, 2, 37))))
    near = ops.from_host(-np.abs(small(-126, 2, 37)))
    for y, x, factor in (
        (zero, ops.from_host(small(-100, 2, 37)), 2.0**-40),  # a product
        (near, ops.from_host(np.full((2, 37), SMALLEST, F32)), 1.0),  # a sum
        (zero, tiny, 2.0**20),  # x
        (tiny, ops.from_host(np.full((2, 37), SMALLEST, F32)), 1.0),  # y
    ):
        yield ops.to_host(ops.add_scaled(y, x, factor, name="adapted"))


def _dropout(ops: TrainingOps) -> Arrays:
    """Half of a normal number, doubled."""
    positions = np.array([0, 1, 129], np.int32)
    x = ops.from_host(small(-127, 3, 37))
    key = DropoutKey(seed=5, step=3, layer=2)
    yield ops.to_host(ops.dropout(x, 0.5, key, positions, np.array([0, 0, 3], np.int32), name="dropped"))


def _sum_of_squares(ops: TrainingOps) -> Arrays:
    for shape in ((3, 50), (1, 200)):
        x = ops.from_host(small(-66, *shape))
        yield np.asarray(ops.sum_of_squares(x, name="squares"), F32).reshape(1)


def _adamw(ops: TrainingOps) -> Arrays:
    """Each result of a step alone in its row, and subnormal parameters and gradients.

    Rows: parameter, gradient, m, v.
    """
    by = AdamW(
        learning_rate=0.5, beta1=0.5, one_minus_beta1=0.5, beta2=0.5, one_minus_beta2=0.5, eps=2.0**-60,
        decay=2.0, correction1=0.5, correction2=0.5,
    )  # fmt: skip
    one, none = np.ones(13, F32), np.zeros(13, F32)
    least, tiny = np.abs(small(-126, 13)), small(-130, 13)
    rows = (
        (one, least, none, none),  # (1 - beta1) * g, and what becomes m
        (one, small(-66, 13), none, none),  # g * g
        (one, none, least, least),  # m and v, halved
        (least, none, none, one),
        (tiny, none, none, one),
        (one, tiny, none, none),
        (none, none, tiny, none),
        (none, none, one, np.abs(tiny)),
        (np.abs(small(-127, 13)), none, none, one),  # doubled by decay
    )
    tensors = [ops.from_host(np.stack(column).astype(F32)) for column in zip(*rows, strict=True)]
    parameter, gradient, m, v = tensors
    ops.adamw(parameter, gradient, m, v, by, name="w")
    for tensor in (parameter, m, v):
        yield ops.to_host(tensor)
    # Moments that two would make normal numbers: constants are a trainer's, and not looked at here.
    by = AdamW(0.5, 2.0, 0.5, 2.0, 0.5, 2.0**-60, 1.0, 0.5, 0.5)
    parameter, gradient, m, v = (
        ops.from_host(np.stack([x, x])) for x in (one, none, np.abs(small(-127, 13)), np.abs(small(-127, 13)))
    )
    ops.adamw(parameter, gradient, m, v, by, name="moments")
    for tensor in (parameter, m, v):
        yield ops.to_host(tensor)


BACKWARD_FLUSHED: Mapping[str, TrainingCase] = MappingProxyType(
    {
        "rms_norm_backward/flushed": partial(_norm_backward, "rms_norm_backward"),
        "head_norm_backward/flushed": partial(_norm_backward, "head_norm_backward"),
        "rope_backward/flushed": _rope_backward,
        "silu_gate_backward/flushed": partial(_gate_backward, "silu_gate_backward"),
        "gelu_gate_backward/flushed": partial(_gate_backward, "gelu_gate_backward"),
        "softcap_backward/flushed": _softcap_backward,
        "attention_backward/flushed": _attention_backward,
        "attention_backward/softcap/flushed": _attention_softcap_backward,
    }
)

UPDATE_FLUSHED: Mapping[str, TrainingCase] = MappingProxyType(
    {
        **{f"linear_backward/{f}/flushed": partial(_linear_backward, f) for f in _FORMATS},
        "matrix/flushed": _matrix,
        "example_products/flushed": _example_products,
        "embed_backward/flushed": _embed_backward,
        "example_sums/flushed": _example_sums,
        "cross_entropy/flushed": _cross_entropy,
        "scale/flushed": _scale,
        "add_scaled/flushed": _add_scaled,
        "dropout/flushed": _dropout,
        "sum_of_squares/flushed": _sum_of_squares,
        "adamw/flushed": _adamw,
        **SUBNORMAL,
    }
)
