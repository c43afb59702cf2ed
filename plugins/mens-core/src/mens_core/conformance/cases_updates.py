"""Cases of loss, gradients of parameters, adapters and update: what each calls, on which operands.

As in `cases`, operands are chosen so that the classic silent errors show: chunks that do not
restart at an example, masked positions that were padded, a rounding of `scale` in the wrong place,
random words in another order, a bias correction left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases_backward import TrainingCase
from mens_core.conformance.inputs import Floats, floats, weight
from mens_core.ops import Format, Ints, Tensor
from mens_core.training_ops import AdamW, DropoutKey, TrainingOps

__all__ = ["UPDATE_CASES"]

_FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")
_OUTPUTS = 300
"""Two chunks and a part of one, and a part of sixteen rows."""
_STARTS: Ints = np.array([0, 130, 130, 240, 300], np.int32)
"""Examples of more than one chunk, of nothing, of less than one, and one over row 256 of the batch."""
_ROWS = 300


def _columns(format_: Format) -> int:
    return 256 if format_.endswith("_k") else 96 if format_.startswith("q") else 83


def _linear_backward(format_: Format, ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    matrix = ops.load_matrix(weight(format_, 203, _OUTPUTS, _columns(format_)))
    dy = floats(201, 7, _OUTPUTS, span=2, binades=12)
    yield ops.to_host(ops.linear_backward(ops.from_host(dy), matrix, name="many"))
    yield ops.to_host(ops.linear_backward(ops.from_host(dy[3:4]), matrix, name="one"))


def _matrix(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    values = floats(204, 19, 140, span=1, binades=8)
    x = ops.from_host(values)
    matrix = ops.matrix(x, name="adapter")
    yield ops.to_host(ops.linear(ops.from_host(floats(205, 3, 140, span=1, binades=8)), matrix, name="y"))
    yield ops.to_host(x)


def _put_rows(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    x = ops.from_host(floats(206, 3, 33))
    yield ops.to_host(ops.put_rows(x, np.array([0, 2, 5], np.int32), 7))


def _example_products(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    a = ops.from_host(floats(207, _ROWS, 21, span=1, binades=10))
    b = ops.from_host(floats(208, _ROWS, 75, span=1, binades=10))
    for left, right in ((a, b), (b, a)):
        yield from _each(ops, ops.example_products(left, right, _STARTS, name="gradient"))


def _embed_backward(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    dy = ops.from_host(floats(209, _ROWS, 40, span=1, binades=10))
    ids = (np.arange(_ROWS) * 7 % 5).astype(np.int32)
    ids[[3, 128, 129]] = 5  # in both chunks of the first example
    ids[127] = 6
    yield from _each(ops, ops.embed_backward(dy, ids, _STARTS, 8, name="gradient"))


def _cross_entropy(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    logits = floats(210, 4, 1031, span=3, binades=8)
    logits[1, 600:] = np.float32(-0.0)
    logits[2, 77] = 60.5  # a probability of 1, and shares near the smallest
    targets = np.array([1030, 0, 77, 500], np.int32)
    losses, gradients = ops.cross_entropy(ops.from_host(logits), targets, name="loss")
    yield ops.to_host(losses)
    yield ops.to_host(gradients)


def _example_sums(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    # Positions of a mask with holes: chunks of few terms, and chunks of none.
    first = [*range(2, 128, 5), 128, *range(640, 700, 3), 900]
    positions = np.array([*first, *range(100, 160)], np.int32)
    starts = np.array([0, len(first), len(first), len(positions)], np.int32)
    losses = ops.from_host(floats(211, len(positions), span=3, binades=10))
    yield ops.to_host(ops.example_sums(losses, positions, starts))


def _scale(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    x = ops.from_host(floats(212, 2, 301, span=4, binades=60))
    for factor in (0.30000001192092896, 1.1754943508222875e-38):
        yield ops.to_host(ops.scale(x, factor, name="scaled"))


def _add_scaled(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    y, x = (ops.from_host(floats(sample, 2, 301, span=4, binades=20)) for sample in (213, 214))
    yield ops.to_host(ops.add_scaled(y, x, 5.656854152679443, name="adapted"))


def _dropout(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    x = ops.from_host(floats(215, 4, 203, span=1, binades=6))
    positions = np.array([0, 1, 129, 2**31 - 1], np.int32)
    examples = np.array([0, 0, 3, 65535], np.int32)
    for rate, key in (
        (0.10000000149011612, DropoutKey(seed=0xFEDCBA9876543210, step=2**32 - 1, layer=65535)),
        (0.5, DropoutKey(seed=1, step=0, layer=0)),
        (0.0, DropoutKey(seed=1, step=0, layer=0)),
    ):
        yield ops.to_host(ops.dropout(x, rate, key, positions, examples, name="dropped"))


def _sum_of_squares(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    for shape in ((9, 150), (1, 1)):
        x = ops.from_host(floats(216, *shape, span=2, binades=10))
        yield np.asarray(ops.sum_of_squares(x, name="squares"), np.float32).reshape(1)


def _adamw(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    # Steps 1 and 2 of beta 0.9 and 0.95; constants are float32 values, as a trainer makes them.
    steps = (
        AdamW(*_float32(3e-4, 0.9, 0.1, 0.95, 0.05, 1e-8, 1 - 3e-5, 0.1, 0.05)),
        AdamW(*_float32(2e-4, 0.9, 0.1, 0.95, 0.05, 1e-8, 1 - 2e-5, 0.19, 0.0975)),
    )
    parameter = ops.from_host(floats(217, 3, 101, span=1, binades=6))
    m, v = (ops.from_host(np.zeros((3, 101), np.float32)) for _ in range(2))
    for sample, by in zip((218, 219), steps, strict=True):
        # From ordinary gradients to those whose square is flushed, and some zeros.
        gradient = floats(sample, 3, 101, span=-3, binades=90)
        gradient[0, :5] = 0
        ops.adamw(parameter, ops.from_host(gradient), m, v, by, name="w")
    yield from _each(ops, [parameter, m, v])


def _float32(*values: float) -> list[float]:
    return [float(np.float32(value)) for value in values]


def _not_finite(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    """Nothing is compared but what `take_faults` says."""
    huge = np.full((_ROWS, 3), 0.5, np.float32)
    huge[250] = np.ldexp(np.float32(1), 127)  # in the last example
    x = ops.from_host(huge)
    ops.scale(x, 2.0, name="scaled")
    ops.example_products(x, x, _STARTS, name="gradient")
    ops.sum_of_squares(x, name="squares")
    return iter(())


def _each(ops: TrainingOps, tensors: list[Tensor]) -> Iterator[Floats]:
    for tensor in tensors:
        yield ops.to_host(tensor)


UPDATE_CASES: Mapping[str, TrainingCase] = MappingProxyType(
    {
        **{f"linear_backward/{f}": partial(_linear_backward, f) for f in _FORMATS},
        "matrix": _matrix,
        "put_rows": _put_rows,
        "example_products": _example_products,
        "embed_backward": _embed_backward,
        "cross_entropy": _cross_entropy,
        "example_sums": _example_sums,
        "scale": _scale,
        "add_scaled": _add_scaled,
        "dropout": _dropout,
        "sum_of_squares": _sum_of_squares,
        "adamw": _adamw,
        "updates_not_finite": _not_finite,
    }
)
