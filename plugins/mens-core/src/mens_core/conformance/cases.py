"""The quick cases: what each calls, on which operands.

Operands are chosen so that the classic silent errors show: chunks that are not full, ragged
outputs, one row and several, ties of rounding, scales that flush, a fused multiply-add, sums
in another order, blocks out of order, masked and unmasked edges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance import cases_rounding
from mens_core.conformance.inputs import Floats, floats, put, stored_float, weight
from mens_core.ops import AttentionSpec, Batch, Format, Ops

__all__ = ["CASES", "Case"]

Case = Callable[[Ops], Iterator[npt.NDArray[Any]]]

_FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")
_COLUMNS: Mapping[Format, int] = MappingProxyType(
    # Not whole chunks: 128 + 128 + 64 floats; 4 + 1 blocks; 3 superblocks.
    {"f32": 320, "f16": 320, "bf16": 320, "q8_0": 160, "q5_0": 160, "q4_0": 160}
)


def _activations(columns: int) -> Floats:
    """Rows that are ordinary, zero, tied in rounding, flushed, and mixed."""
    x = floats(1, 6, columns, span=3, binades=12)
    x[1, : columns // 2] = 0
    # amax 127 makes the int8 scale 1: these round half to even.
    x[2] = np.arange(columns) % 254 - 127 + np.float32(0.5)
    x[2, ::32] = 127
    # amax / 127 is subnormal, so the scale flushes and every code is 0.
    x[3, : columns // 2] = np.ldexp(floats(2, columns // 2), -121)
    x[4] = np.ldexp(x[4], 40)
    return x


def _linear(format_: Format, ops: Ops) -> Iterator[npt.NDArray[Any]]:
    columns = _COLUMNS.get(format_, 768)
    matrix = ops.load_matrix(weight(format_, 3, 35, columns))
    x = _activations(columns)
    yield ops.to_host(ops.linear(put(ops, x), matrix, name="many"))
    yield ops.to_host(ops.linear(put(ops, x[5:]), matrix, name="one"))
    if format_ == "f32":
        yield from cases_rounding.linear(ops)


def _linear_many(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    formats: tuple[Format, ...] = ("q8_0", "q4_k", "f32")
    matrices = [ops.load_matrix(weight(f, 4 + i, 9 + i, 256)) for i, f in enumerate(formats)]
    x = put(ops, floats(7, 2, 256, span=2, binades=8))
    for y in ops.linear_many(x, matrices, names=formats):
        yield ops.to_host(y)


def _embed(format_: Format, ops: Ops) -> Iterator[npt.NDArray[Any]]:
    table = ops.load_matrix(weight(format_, 8, 7, _COLUMNS.get(format_, 512)))
    ids = np.array([6, 0, 3, 3], np.int32)
    yield ops.to_host(ops.embed(table, ids, None, name="plain"))
    yield ops.to_host(ops.embed(table, ids, 25.298221588134766, name="scaled"))


def _rms_norm(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    x = put(ops, floats(10, 3, 328, span=2, binades=10))
    for plus_one in (False, True):
        w = ops.load_vector(stored_float(floats(11, 328)), plus_one=plus_one)
        yield ops.to_host(ops.rms_norm(x, w, 9.999999974752427e-07, name="norm"))
    yield from cases_rounding.rms_norm(ops)


def _head_norm(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    x = put(ops, floats(12, 2, 3 * 136, span=1, binades=6))
    w = ops.load_vector(stored_float(floats(13, 136)))
    yield ops.to_host(ops.head_norm(x, w, 3, 9.999999974752427e-07, name="norm"))
    yield from cases_rounding.head_norm(ops)


def _rope(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    positions = np.array([0, 1, 127, 128, 129, 40_000, 131_071], np.int32)
    # A wheel that turns once in 7, 20, 33, ... positions: any frequencies would do.
    frequencies = [(1 << 128) // (7 + 13 * i) for i in range(24)]
    x = put(ops, floats(14, 7, 2 * 48, span=2))
    for factor in (None, (5, 4)):
        table = ops.rotary_table(frequencies, factor)
        yield ops.to_host(ops.rope(x, 2, table, positions, name="rope"))
    yield from cases_rounding.rope(ops)


_SPEC = {"heads": 4, "kv_heads": 2, "head_dim": 40, "scale": 0.158203125}
_ROWS = 150
"""Of the longer sequence: its last 22 positions lie in a second block."""


def _attention(
    ops: Ops, *, window: int | None = None, softcap: float | None = None
) -> Iterator[npt.NDArray[Any]]:
    spec = AttentionSpec(**_SPEC, window=window, softcap=softcap)  # type: ignore[arg-type]
    cache = ops.new_kv_cache(layers=2, kv_heads=2, head_dim=40, blocks=4)
    # Two sequences, blocks out of order; then one decode row of each.
    first = _batch([(0, _ROWS), (0, 5)])
    second = _batch([(_ROWS, 1), (5, 1)])
    for batch, sample in ((first, 15), (second, 18)):
        rows = len(batch.positions)
        q = put(ops, floats(sample, rows, 160, span=2, binades=3))
        k = put(ops, floats(sample + 1, rows, 80, span=1, binades=3))
        v = put(ops, floats(sample + 2, rows, 80, span=1, binades=3))
        ops.kv_append(cache, 1, k, v, batch)
        yield ops.to_host(ops.attention(q, cache, 1, batch, spec, name="attention"))


def _batch(slices: list[tuple[int, int]]) -> Batch:
    positions = np.concatenate([np.arange(start, start + count) for start, count in slices])
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions.astype(np.int32),
        starts=np.cumsum([0, *(count for _, count in slices)]).astype(np.int32),
        block_tables=np.array([[3, 0], [1, -1]], np.int32),
        logit_rows=np.array([], np.int32),
    )


def _add(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    a, b = floats(21, 2, 301, span=4, binades=20), floats(22, 2, 301, span=4, binades=20)
    yield ops.to_host(ops.add(put(ops, a), put(ops, b), name="add"))


def _gate(operator: str, ops: Ops) -> Iterator[npt.NDArray[Any]]:
    gate = floats(23, 2, 517, span=3, binades=16)
    gate[1, :160] = np.arange(-80, 80) + floats(24, 160)
    up = floats(25, 2, 517, span=2, binades=10)
    yield ops.to_host(getattr(ops, operator)(put(ops, gate), put(ops, up), name="gated"))


def _softcap(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    x = floats(26, 2, 517, span=7, binades=24)
    for cap in (30.0, 50.0):
        yield ops.to_host(ops.softcap(put(ops, x), cap, name="capped"))


def _take_rows(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    yield ops.to_host(ops.take_rows(put(ops, floats(27, 6, 33)), np.array([1, 4, 5], np.int32)))


def _logits() -> Floats:
    logits = floats(28, 4, 1031, span=4, binades=8)
    logits[1] = 0
    logits[1, 600:] = np.float32(-0.0)  # equal to +0: the lowest id wins
    logits[2, [77, 900]] = 20.5  # a tie at the top
    logits[3] -= np.float32(64)
    return logits


def _penalise(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    logits = put(ops, _logits())
    ids = np.array([0, 5, 77, 1030], np.int32)
    repetition = np.array([1.3, 1, 1.3, 0.7], np.float32)
    subtract = np.array([0.1, -3.7, 0, 1.9], np.float32)
    ops.penalise(logits, 2, ids, repetition=repetition, subtract=subtract)
    yield ops.to_host(logits)


def _argmax(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    yield np.asarray(ops.argmax(put(ops, _logits())), np.int32)


def _token_weights(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    logits = put(ops, _logits())
    for row, temperature in ((0, 1.0), (0, 0.699999988079071), (2, 1.7999999523162842), (3, 0.03125)):
        yield np.asarray(ops.token_weights(logits, row, temperature), np.uint64)


def _log_normaliser(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    yield np.asarray(ops.log_normaliser(put(ops, _logits())), np.float32)
    # Near zero, where no coarse last bit hides the sum's and the logarithm's own.
    near_zero = floats(30, 24, 260, span=0) - np.float32(5.5)
    yield np.asarray(ops.log_normaliser(put(ops, near_zero)), np.float32)


def _not_finite(ops: Ops) -> Iterator[npt.NDArray[Any]]:
    """Nothing is compared but what `take_faults` says."""
    x = floats(29, 3, 64)
    x[1, 5::7] = np.ldexp(np.float32(1), 127)  # finite, and its double is not
    ops.add(put(ops, x), put(ops, x), name="doubled")
    return iter(())


CASES: Mapping[str, Case] = MappingProxyType(
    {
        **{f"embed/{f}": partial(_embed, f) for f in _FORMATS},
        **{f"linear/{f}": partial(_linear, f) for f in _FORMATS},
        "linear_many": _linear_many,
        "rms_norm": _rms_norm,
        "head_norm": _head_norm,
        "rope": _rope,
        "attention": _attention,
        "attention/window": partial(_attention, window=70),
        "attention/softcap": partial(_attention, softcap=20.0),
        "add": _add,
        "silu_gate": partial(_gate, "silu_gate"),
        "gelu_gate": partial(_gate, "gelu_gate"),
        "softcap": _softcap,
        "take_rows": _take_rows,
        "penalise": _penalise,
        "argmax": _argmax,
        "token_weights": _token_weights,
        "log_normaliser": _log_normaliser,
        "not_finite": _not_finite,
    }
)
