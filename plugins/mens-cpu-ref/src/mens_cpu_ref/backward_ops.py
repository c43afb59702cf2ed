"""Gradients of the forward's operators on the CPU lane (native/backward_abi.h).

`BackwardOps` is mixed into `CpuOps`, whose functions then include those of `BACKWARD_OPERATORS`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mens_core.ops import AttentionSpec, Batch, Fault, Ints
from mens_core.training_ops import AttentionSaved
from mens_cpu_ref.arrays import Rows, new_rows
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.matrices import KvCache
from mens_cpu_ref.rotary import RotaryTable

__all__ = ["BackwardOps"]

_OUT_OF_RANGE = -2


class BackwardOps(CpuOps):
    """The backward of the forward's operators: one half of `TrainingOps`."""

    def rms_norm_backward(self, dy: Rows, x: Rows, weight: Rows, eps: float, *, name: str) -> Rows:
        """Gradient of `rms_norm` with respect to x."""
        return self.head_norm_backward(dy, x, weight, 1, eps, name=name)

    def head_norm_backward(
        self, dy: Rows, x: Rows, weight: Rows, heads: int, eps: float, *, name: str
    ) -> Rows:
        """Gradient of `head_norm` with respect to x."""
        rows, width = _alike(name, dy=dy, x=x)
        if width != heads * len(weight.values):
            raise ValueError(f"{name}: x [{rows}, {width}] is not {heads} heads of {len(weight.values)}")
        dx = new_rows(rows, width)
        code = self._functions["norm_backward"](
            dy.address, x.address, weight.address, rows, heads, width // heads, eps, dx.address
        )
        return self._checked(code, dx, name)

    def rope_backward(self, dy: Rows, heads: int, table: RotaryTable, positions: Ints, *, name: str) -> Rows:
        """Rotate each head's halves by the negative angles."""
        rows, width = dy.values.shape
        if width != heads * 2 * table.pairs or len(positions) != rows:
            raise ValueError(
                f"{name}: dy [{rows}, {width}] with {len(positions)} positions is not "
                f"{heads} heads of {2 * table.pairs}"
            )
        dx = new_rows(rows, width)
        rotate, index = self._functions["rope_backward"], self._index(positions)
        code = rotate(dy.address, rows, heads, *table.arguments, index, dx.address)
        if code == _OUT_OF_RANGE:
            table.reach(positions)
            code = rotate(dy.address, rows, heads, *table.arguments, index, dx.address)
        return self._checked(code, dx, name)

    def silu_gate_backward(self, dy: Rows, gate: Rows, up: Rows, *, name: str) -> tuple[Rows, Rows]:
        """Gradients of gate and up in silu(gate) * up."""
        return self._gate_backward("silu_gate_backward", dy, gate, up, name)

    def gelu_gate_backward(self, dy: Rows, gate: Rows, up: Rows, *, name: str) -> tuple[Rows, Rows]:
        """Gradients of gate and up in gelu_tanh(gate) * up."""
        return self._gate_backward("gelu_gate_backward", dy, gate, up, name)

    def softcap_backward(self, dy: Rows, x: Rows, cap: float, *, name: str) -> Rows:
        """Gradient of cap * tanh(x / cap)."""
        rows, width = _alike(name, dy=dy, x=x)
        dx = new_rows(rows, width)
        code = self._functions["softcap_backward"](dy.address, x.address, rows, width, cap, dx.address)
        return self._checked(code, dx, name)

    def attention_saving(
        self, q: Rows, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> AttentionSaved:
        """`attention`, with the m and l of every row and head."""
        step = self._attention_step(q, cache, layer, batch, spec, name)
        rows, width = q.values.shape
        out, m, l = new_rows(rows, width), new_rows(rows, spec.heads), new_rows(rows, spec.heads)  # noqa: E741
        code = self._functions["attention_saving"](q.address, *step, out.address, m.address, l.address)
        return AttentionSaved(self._checked(code, out, name), m, l)

    def attention_backward(
        self,
        dy: Rows,
        q: Rows,
        saved: AttentionSaved,
        cache: KvCache,
        layer: int,
        batch: Batch,
        spec: AttentionSpec,
        *,
        name: str,
    ) -> tuple[Rows, Rows, Rows]:
        """Gradients of q, k and v.

        Raises:
            ValueError: tensors that do not fit each other, or a sequence that does not begin at
                position 0 or has not all its rows in the batch.
        """
        step = self._attention_step(q, cache, layer, batch, spec, name)
        rows, width = _alike(name, dy=dy, q=q, out=saved.out)
        if _alike(name, m=saved.m, l=saved.l) != (rows, spec.heads):
            raise ValueError(f"{name}: m {saved.m.values.shape} is not [{rows}, {spec.heads}]")
        for sequence, (first, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
            if not np.array_equal(batch.positions[first:end], np.arange(end - first)):
                raise ValueError(
                    f"{name}: the rows of sequence {sequence} are not its positions from 0 on; "
                    "a backward pass needs whole sequences"
                )
        dq = new_rows(rows, width)
        dk, dv = (new_rows(rows, spec.kv_heads * spec.head_dim) for _ in range(2))
        code = self._functions["attention_backward"](
            dy.address,
            q.address,
            saved.out.address,
            saved.m.address,
            saved.l.address,
            *step,
            dq.address,
            dk.address,
            dv.address,
        )
        self._check_all(code, (dq, dk, dv), name)
        return dq, dk, dv

    def _attention_step(
        self, q: Rows, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, name: str
    ) -> tuple[Any, ...]:
        rows, width = q.values.shape
        found = (width, spec.kv_heads, spec.head_dim)
        if found != (spec.heads * spec.head_dim, cache.kv_heads, cache.head_dim):
            raise ValueError(f"{name}: q [{rows}, {width}] and the cache do not fit {spec}")
        return (
            rows,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            self._index(batch.positions),
            self._index(batch.starts),
            self._index(batch.block_tables),
            *batch.block_tables.shape,
            cache.blocks,
            cache.key_addresses[layer],
            cache.value_addresses[layer],
            spec.scale,
            spec.window or 0,
            spec.softcap or 0.0,
        )

    def _gate_backward(self, operator: str, dy: Rows, gate: Rows, up: Rows, name: str) -> tuple[Rows, Rows]:
        rows, width = _alike(name, dy=dy, gate=gate, up=up)
        dgate, dup = new_rows(rows, width), new_rows(rows, width)
        code = self._functions[operator](
            dy.address, gate.address, up.address, rows, width, dgate.address, dup.address
        )
        self._check_all(code, (dgate, dup), name)
        return dgate, dup

    def _check_all(self, code: int, outputs: tuple[Rows, ...], name: str) -> None:
        """One fault for an operator of several outputs: the rows in which any is not finite."""
        if code <= 0:
            self._checked(code, outputs[0], name)
        else:
            finite = np.logical_and.reduce([np.isfinite(out.values).all(axis=1) for out in outputs])
            self._faults.append(Fault(name, tuple(int(row) for row in np.flatnonzero(~finite))))


def _alike(name: str, **tensors: Rows) -> tuple[int, int]:
    shapes = {key: tensor.values.shape for key, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(
            f"{name}: " + ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items()) + " differ"
        )
    rows, width = next(iter(shapes.values()))
    return rows, width
