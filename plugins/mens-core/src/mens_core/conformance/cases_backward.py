"""Cases of the backward of the forward's operators.

Operands as in `cases`: chunks that are not full, several query and KV blocks, groups of heads,
windows that end inside a block, activations out to where their exponentials flush.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.inputs import floats, put, stored_float
from mens_core.ops import AttentionSpec, Batch
from mens_core.training_ops import TrainingOps

__all__ = ["BACKWARD_CASES", "TrainingCase"]

TrainingCase = Callable[[TrainingOps], Iterator[npt.NDArray[Any]]]

_EPS = 9.999999974752427e-07


def _rms_norm_backward(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    x, dy = (put(ops, floats(101 + i, 9, 328, span=2, binades=10)) for i in range(2))
    w = ops.load_vector(stored_float(floats(103, 328)), plus_one=True)
    yield ops.to_host(ops.rms_norm_backward(dy, x, w, _EPS, name="norm"))


def _head_norm_backward(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    x, dy = (put(ops, floats(104 + i, 2, 3 * 136, span=1, binades=6)) for i in range(2))
    w = ops.load_vector(stored_float(floats(106, 136)))
    yield ops.to_host(ops.head_norm_backward(dy, x, w, 3, _EPS, name="norm"))


def _rope_backward(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    positions = np.array([0, 1, 127, 128, 129, 40_000, 131_071], np.int32)
    table = ops.rotary_table([(1 << 128) // (7 + 13 * i) for i in range(24)], (5, 4))
    dy = put(ops, floats(107, 7, 2 * 48, span=2))
    yield ops.to_host(ops.rope_backward(dy, 2, table, positions, name="rope"))


def _gate_backward(operator: str, ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    gate = floats(108, 2, 517, span=3, binades=16)
    gate[1, :200] = np.arange(-100, 100) + floats(109, 200)
    gate[0, :2] = np.ldexp(np.array([1, -1], np.float32), 100)  # whose squares overflow
    dy, up = (put(ops, floats(110 + i, 2, 517, span=2, binades=10)) for i in range(2))
    for gradient in getattr(ops, operator)(dy, put(ops, gate), up, name="gated"):
        yield ops.to_host(gradient)


def _softcap_backward(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    x, dy = put(ops, floats(112, 2, 517, span=7, binades=24)), put(ops, floats(113, 2, 517, span=2))
    for cap in (30.0, 50.0):
        yield ops.to_host(ops.softcap_backward(dy, x, cap, name="capped"))


_LENGTHS = (150, 5)
"""Of two sequences: the last 22 positions of the longer one lie in a second block."""


def _attention_backward(
    ops: TrainingOps, *, window: int | None = None, softcap: float | None = None
) -> Iterator[npt.NDArray[Any]]:
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=40, scale=0.158203125, window=window, softcap=softcap)
    rows = sum(_LENGTHS)
    batch = Batch(
        token_ids=np.zeros(rows, np.int32),
        positions=np.concatenate([np.arange(n) for n in _LENGTHS]).astype(np.int32),
        starts=np.cumsum([0, *_LENGTHS]).astype(np.int32),
        block_tables=np.array([[3, 0], [1, -1]], np.int32),
        logit_rows=np.array([], np.int32),
    )
    cache = ops.new_kv_cache(layers=2, kv_heads=2, head_dim=40, blocks=4)
    q, dy = (put(ops, floats(114 + i, rows, 160, span=2, binades=3)) for i in range(2))
    k, v = (put(ops, floats(116 + i, rows, 80, span=1, binades=3)) for i in range(2))
    ops.kv_append(cache, 1, k, v, batch)
    saved = ops.attention_saving(q, cache, 1, batch, spec, name="attention")
    for tensor in (saved.out, saved.m, saved.l):
        yield ops.to_host(tensor)
    for gradient in ops.attention_backward(dy, q, saved, cache, 1, batch, spec, name="attention"):
        yield ops.to_host(gradient)


def _not_finite(ops: TrainingOps) -> Iterator[npt.NDArray[Any]]:
    """Nothing is compared but what `take_faults` says: either of two outputs makes the fault."""
    gate, up, dy = (np.ones((4, 40), np.float32) for _ in range(3))
    up[1, 20] = gate[2, 39] = np.ldexp(np.float32(1), 127)
    dy[1:3] = 4
    ops.silu_gate_backward(put(ops, dy), put(ops, gate), put(ops, up), name="gated")
    return iter(())


BACKWARD_CASES: Mapping[str, TrainingCase] = MappingProxyType(
    {
        "rms_norm_backward": _rms_norm_backward,
        "head_norm_backward": _head_norm_backward,
        "rope_backward": _rope_backward,
        "silu_gate_backward": partial(_gate_backward, "silu_gate_backward"),
        "gelu_gate_backward": partial(_gate_backward, "gelu_gate_backward"),
        "softcap_backward": _softcap_backward,
        "attention_backward": _attention_backward,
        "attention_backward/window": partial(_attention_backward, window=70),
        "attention_backward/softcap": partial(_attention_backward, softcap=20.0),
        "backward_not_finite": _not_finite,
    }
)
