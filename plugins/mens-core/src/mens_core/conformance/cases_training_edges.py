"""Cases of training at the edges: zeros with a sign, and results that are not finite in one place alone.

A fault is looked for where an implementation may forget to look: the first and the last element, one of
several results, a part of the work that others follow.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.cases_backward import TrainingCase
from mens_core.conformance.inputs import Floats, floats, stored_float
from mens_core.ops import AttentionSpec, Batch
from mens_core.training_ops import AdamW, TrainingOps

__all__ = ["BACKWARD_EDGES", "UPDATE_EDGES"]

Arrays = Iterator[npt.NDArray[Any]]

F32 = np.float32
_HUGE = F32(2.0**100)
"""Finite, and its square is not."""


def _norm_zeros(ops: TrainingOps) -> Arrays:
    """Gradients of -0: products that are all -0 make a sum of +0. Nine rows: eight side by side, and one."""
    x = np.abs(floats(241, 9, 24)) + F32(0.5)
    dy = np.full((9, 24), -0.0, F32)
    w = ops.load_vector(stored_float(np.ones(24, F32)))
    yield ops.to_host(ops.rms_norm_backward(ops.from_host(dy), ops.from_host(x), w, 0.5, name="zeros"))


def _attention_faults(ops: TrainingOps) -> Arrays:
    """Nothing is compared but what `take_faults` says.

    Two sequences, of 40 positions and of 3. First dq alone overflows, in row 1 of the first and nowhere
    after; then dq of row 30; then dk of row 0; then dv of row 41, in the second sequence.
    """
    lengths, rows = (40, 3), 43
    spec = AttentionSpec(heads=1, kv_heads=1, head_dim=8, scale=1.0)
    batch = Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.concatenate([np.arange(n) for n in lengths]).astype(np.int32),
        starts=np.array([0, 40, rows], np.int32),
        block_tables=np.array([[0], [1]], np.int32),
        logit_rows=np.array([], np.int32),
    )
    cache = ops.new_kv_cache(layers=1, kv_heads=1, head_dim=8, blocks=2)
    ordinary = floats(242, 4, rows, 8, span=-1)

    def ask(name: str, q: Floats, k: Floats, v: Floats, dy: Floats) -> None:
        of_q, of_dy = ops.from_host(q), ops.from_host(dy)
        ops.kv_append(cache, 0, ops.from_host(k), ops.from_host(v), batch)
        saved = ops.attention_saving(of_q, cache, 0, batch, spec, name=name)
        ops.attention_backward(of_dy, of_q, saved, cache, 0, batch, spec, name=name)

    for row in (1, 30):
        # Keys of 2^40 under queries of 2^-40: weights are ordinary, and dS times a key is too great.
        q, k, v, dy = ordinary.copy()
        dy[row] *= _HUGE
        ask(f"queries, row {row}", q * F32(2.0**-40), k * F32(2.0**40), v, dy)
    q, k, v, dy = ordinary.copy()
    dy[1] *= _HUGE
    ask("keys", q * F32(2.0**40), k * F32(2.0**-40), v, dy)
    q, k, v, dy = ordinary.copy()
    v[40:] = 0
    dy[41] = dy[42] = F32(1.9 * 2.0**127)
    k[40:] = 0
    k[41] = 64  # nobody of the second sequence weighs anything but row 41
    q[40:] = 1
    ask("values", q, k, v, dy)
    return iter(())


def _gate_faults(ops: TrainingOps) -> Arrays:
    """Of row 1 the first element of dup, of row 3 the last of dgate, in either activation."""
    for operator in ("silu_gate_backward", "gelu_gate_backward"):
        dy, gate, up = (np.ones((5, 37), F32) for _ in range(3))
        dy[1, 0], gate[1, 0], up[1, 0] = _HUGE, _HUGE, 0
        dy[3, -1], up[3, -1] = _HUGE, _HUGE
        getattr(ops, operator)(*(ops.from_host(x) for x in (dy, gate, up)), name=operator)
    return iter(())


def _product_faults(ops: TrainingOps) -> Arrays:
    """One element that is not finite, the first or the last, in either order; then a product without one."""
    starts = np.array([0, 5, 9], np.int32)
    for p, q in ((0, 0), (20, 74)):
        a, b = floats(243, 9, 21), floats(244, 9, 75)
        a[7, p] = b[7, q] = _HUGE
        x, y = ops.from_host(a), ops.from_host(b)
        ops.example_products(x, y, starts, name=f"{p}, {q}")
        ops.example_products(y, x, starts, name=f"{q}, {p}")
        fewer = ops.from_host(np.ascontiguousarray(floats(243, 9, 21)[:, :20]))
        for left, right in ((fewer, y), (y, fewer)):
            yield from map(ops.to_host, ops.example_products(left, right, starts, name="finite"))


def _loss_faults(ops: TrainingOps) -> Arrays:
    """Of a table's gradient the last row, of an example's losses the sum, of squares the last element."""
    starts = np.array([0, 3, 6], np.int32)
    dy = np.ones((6, 19), F32)
    dy[4:, -1] = F32(2.0**127)
    ids = np.array([0, 1, 2, 0, 3, 3], np.int32)
    ops.embed_backward(ops.from_host(dy), ids, starts, 4, name="table")
    losses = np.array([1, 1, 1, 1, 2.0**127, 2.0**127], F32)
    positions = np.array([1, 2, 3, 1, 2, 3], np.int32)
    ops.example_sums(ops.from_host(losses), positions, starts)
    squares = np.ones((3, 50), F32)
    squares[-1, -1] = _HUGE
    ops.sum_of_squares(ops.from_host(squares), name="squares")
    ops.add_scaled(ops.from_host(squares), ops.from_host(squares), float(_HUGE), name="adapted")
    return iter(())


def _adamw_faults(ops: TrainingOps) -> Arrays:
    """The second moment alone, of row 1; the parameter alone, of row 2; both, of row 3 in different elements.

    A row is named once.
    """
    by = AdamW(0.5, 0.5, 0.5, 0.5, 0.5, 9.99999993922529e-09, 2.0, 0.5, 0.5)
    for name, row_of_v, row_of_p in (("v", 1, None), ("parameter", None, 2), ("both", 3, 3)):
        parameter, gradient, m, v = (np.ones((4, 13), F32) for _ in range(4))
        if row_of_v is not None:
            gradient[row_of_v, 3] = F32(2.0**70)
        if row_of_p is not None:
            parameter[row_of_p, 12] = F32(1.5 * 2.0**127)
        of_p, of_g, of_m, of_v = (ops.from_host(x) for x in (parameter, gradient, m, v))
        ops.adamw(of_p, of_g, of_m, of_v, by, name=name)
    return iter(())


BACKWARD_EDGES: Mapping[str, TrainingCase] = MappingProxyType(
    {
        "rms_norm_backward/zeros": _norm_zeros,
        "silu_gate_backward/faults": _gate_faults,
        "attention_backward/faults": _attention_faults,
    }
)

UPDATE_EDGES: Mapping[str, TrainingCase] = MappingProxyType(
    {
        "example_products/faults": _product_faults,
        "embed_backward/faults": _loss_faults,
        "adamw/faults": _adamw_faults,
    }
)
