"""Operators of serving on tensors that hold subnormals, which only a lane that trains can be given.

Each would be seen in the bytes if it were not zero: it meets a number that makes it great.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases_backward import TrainingCase
from mens_core.conformance.cases_flushed import SMALLEST, codes, large, small, stored
from mens_core.conformance.inputs import BLOCKS, stored_float, weight
from mens_core.ops import AttentionSpec, Batch, Format, StoredTensor
from mens_core.training_ops import TrainingOps

__all__ = ["SUBNORMAL", "block_of", "great_weights", "turned", "whole"]

Arrays = Iterator[npt.NDArray[Any]]

F32 = np.float32
_FORMATS: tuple[Format, ...] = ("f32", "f16", "bf16", *BLOCKS)
_ROWS = 20
"""Enough that a lane may take other kernels than for a few."""


def whole(rows: int) -> Batch:
    return Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.arange(rows, dtype=np.int32),
        starts=np.array([0, rows], np.int32),
        block_tables=np.array([[0]], np.int32),
        logit_rows=np.array([], np.int32),
    )


def turned(operator: str, ops: TrainingOps) -> Arrays:
    """Results that are flushed; operands that an attention factor of 7 would make normal numbers."""
    positions = np.array([0, 1, 2, 129, 1000], np.int32)
    frequencies = [(1 << 128) // (7 + 13 * i) for i in range(12)]
    signs = np.sign(small(0, len(positions), 2 * 24))
    for size, factor in ((SMALLEST, None), (SMALLEST / 2, (7, 1))):
        table = ops.rotary_table(frequencies, factor)
        x = ops.from_host((signs * size).astype(F32))
        yield ops.to_host(getattr(ops, operator)(x, 2, table, positions, name="turned"))


def block_of(format_: Format) -> int:
    """Columns of a quantised weight: a super-block, or three blocks."""
    return BLOCKS[format_][0] if format_.endswith("_k") else 3 * BLOCKS[format_][0]


def great_weights(format_: Format, rows: int, columns: int) -> StoredTensor:
    """Numbers of 2^14 or more."""
    if format_ in BLOCKS:
        return large(format_, 311, rows, columns)
    return stored(format_, small(14, rows, columns))


def _linear(format_: Format, ops: TrainingOps) -> Arrays:
    """Activations that are subnormal; of quantised weights, beside one that makes their scale 2^-126.

    Of those also products of two scales that are flushed, as in serving.
    """
    # Floats in whole vectors and not; many rows with many outputs, and with few.
    sizes: tuple[tuple[int, int, int], ...] = (
        (1, 5, 83),
        (3, 5, 88),
        (17, 132, 88),
        (17, 20, 88),
        (17, 130, 83),
    )
    if format_ in BLOCKS:
        sizes = tuple((rows, outputs, block_of(format_)) for rows, outputs, _ in sizes[:3])
    for rows, outputs, columns in sizes:
        x = small(-127, rows, columns)
        if format_ in BLOCKS:
            x[:, ::32] = 127 * SMALLEST
        matrix = ops.load_matrix(great_weights(format_, outputs, columns))
        yield ops.to_host(ops.linear(ops.from_host(x), matrix, name="operands"))
        if format_ in BLOCKS:
            matrix = ops.load_matrix(weight(format_, 312, outputs, columns))
            x = codes(rows, columns, -120)
            yield ops.to_host(ops.linear(ops.from_host(x), matrix, name="results"))


def _norm(operator: str, ops: TrainingOps) -> Arrays:
    """x below 2^-126, beside a root that makes it great."""
    width = 48 if operator == "rms_norm" else 16
    x, w = small(-130, _ROWS, 48), ops.load_vector(stored_float(small(0, width)))
    if operator == "rms_norm":
        yield ops.to_host(ops.rms_norm(ops.from_host(x), w, SMALLEST, name="operands"))
    else:
        yield ops.to_host(ops.head_norm(ops.from_host(x), w, 3, SMALLEST, name="operands"))


def _attention(ops: TrainingOps) -> Arrays:
    """Queries below 2^-126, and keys that make scores of them."""
    spec = AttentionSpec(heads=2, kv_heads=1, head_dim=8, scale=1.0)
    for q, k in ((-128, 126), (126, -128)):
        cache = ops.new_kv_cache(layers=1, kv_heads=1, head_dim=8, blocks=1)
        batch = whole(_ROWS)
        keys, values = np.abs(small(k, _ROWS, 8)), small(0, _ROWS, 8)
        ops.kv_append(cache, 0, ops.from_host(keys), ops.from_host(values), batch)
        queries = ops.from_host(np.abs(small(q, _ROWS, 16)))
        yield ops.to_host(ops.attention(queries, cache, 0, batch, spec, name="operands"))


def _add(ops: TrainingOps) -> Arrays:
    a, b = np.abs(small(-127, 2, 37)), np.abs(small(-127, 2, 37))
    yield ops.to_host(ops.add(ops.from_host(a), ops.from_host(b), name="operands"))


def _gate(operator: str, ops: TrainingOps) -> Arrays:
    gate, up = small(6, 2, 37), small(-128, 2, 37)
    yield ops.to_host(getattr(ops, operator)(ops.from_host(gate), ops.from_host(up), name="up"))
    # Its half is flushed where it is kept itself; times an up that is great.
    gate, up = small(-128, 2, 37), small(100, 2, 37)
    yield ops.to_host(getattr(ops, operator)(ops.from_host(gate), ops.from_host(up), name="gate"))


def _softcap(ops: TrainingOps) -> Arrays:
    yield ops.to_host(ops.softcap(ops.from_host(small(-130, 2, 37)), 30.0, name="operands"))


def _choosing(operator: str, ops: TrainingOps) -> Arrays:
    """Logits that are all zero, where what is subnormal is."""
    logits = np.zeros((2, 37), F32)
    logits[:, 5::3] = small(-127, 2, 11)
    x = ops.from_host(logits)
    if operator == "argmax":
        yield np.asarray(ops.argmax(x), np.int32)
    elif operator == "token_weights":
        yield np.asarray(ops.token_weights(x, 1, SMALLEST), np.uint64)
    else:
        ids = np.arange(0, 37, dtype=np.int32)
        quarters, nothing = np.full(37, 0.25, F32), np.zeros(37, F32)
        ops.penalise(x, 1, ids, repetition=quarters, subtract=nothing)
        yield ops.to_host(x)[1:]


SUBNORMAL: Mapping[str, TrainingCase] = MappingProxyType(
    {
        **{f"linear/{f}/subnormal": partial(_linear, f) for f in _FORMATS},
        "rms_norm/subnormal": partial(_norm, "rms_norm"),
        "head_norm/subnormal": partial(_norm, "head_norm"),
        "rope/subnormal": partial(turned, "rope"),
        "attention/subnormal": _attention,
        "add/subnormal": _add,
        "silu_gate/subnormal": partial(_gate, "silu_gate"),
        "gelu_gate/subnormal": partial(_gate, "gelu_gate"),
        "softcap/subnormal": _softcap,
        **{f"{name}/subnormal": partial(_choosing, name) for name in ("argmax", "token_weights", "penalise")},
    }
)
"""By name; the part before the first slash is the operator."""
