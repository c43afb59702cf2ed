"""Gradients of the forward's operators over the grid kernels: docs/numerics.md, section 12.

One half of `GridTrainingOps`; `grid_update_ops` is the other.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mens_core.grid_device import Buffer, constants
from mens_core.grid_launches import alike
from mens_core.grid_ops import TALL, GridOps
from mens_core.grid_tensors import GridKvCache, GridRotaryTable, GridTensor
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import BLOCK, AttentionSpec, Batch, Ints
from mens_core.training_ops import AttentionSaved

__all__ = ["PIECE", "GridBackwardOps"]

PIECE = 1 << 24
"""Weights that are dequantised at once, or those of one chunk of outputs."""
_SIDE = 8
"""Queries or keys that a group of attention's backward takes: kSide of args.h."""


class GridBackwardOps(GridOps):
    """The backward of each operator of the forward."""

    def linear_backward(self, dy: GridTensor, weight: Any, *, name: str) -> GridTensor:
        """dy W, W dequantised element by element."""
        rows, outputs = dy.shape
        if outputs != weight.rows:
            raise ValueError(f"{name}: dy [{rows}, {outputs}] does not fit [{weight.rows}, {weight.columns}]")
        return self._launch_linear_backward(dy, weight, name)

    def _launch_linear_backward(self, dy: GridTensor, weight: Any, name: str) -> GridTensor:
        """Weights that a lane packs in its own way are dequantised piece by piece, by its `embed`."""
        out, flags = self._new(dy.shape[0], weight.columns), self._flags(name, dy.shape[0])
        if isinstance(weight, GridMatrix):
            self._add_outputs(dy, 0, weight, out, flags)
            return out
        step = max(1, PIECE // weight.columns // BLOCK) * BLOCK
        for first in range(0, weight.rows, step):
            ids = np.arange(first, min(first + step, weight.rows), dtype=np.int32)
            rows = self.embed(weight, ids, None, name=name)
            self._add_outputs(
                dy, first, GridMatrix("f32", len(ids), weight.columns, 0, rows.buffer), out, flags
            )
        return out

    def _add_outputs(
        self, dy: GridTensor, first: int, weight: GridMatrix, out: GridTensor, flags: Buffer
    ) -> None:
        """What the outputs from `first` on give, behind those before them."""
        rows, outputs = dy.shape
        self._run(
            f"vox_linear_backward_{weight.format}",
            (dy.buffer, weight.buffer, out.buffer, flags),
            constants(rows, outputs, weight.columns, first, first + weight.rows),
            (weight.columns, -(-rows // TALL)),
        )

    def rms_norm_backward(
        self, dy: GridTensor, x: GridTensor, weight: GridTensor, eps: float, *, name: str
    ) -> GridTensor:
        """Gradient of `rms_norm` with respect to x."""
        return self.head_norm_backward(dy, x, weight, 1, eps, name=name)

    def head_norm_backward(
        self, dy: GridTensor, x: GridTensor, weight: GridTensor, heads: int, eps: float, *, name: str
    ) -> GridTensor:
        """Gradient of `head_norm` with respect to x."""
        shape, (width,) = alike(name, dy=dy, x=x), weight.shape
        if shape[1] != heads * width:
            raise ValueError(f"{name}: x {list(shape)} is not {heads} heads of {width}")
        return self._rows(
            "vox_norm_backward",
            (dy.buffer, x.buffer, weight.buffer),
            shape,
            constants(heads, width, float(eps)),
            name,
            across=heads * GROUP,
        )

    def rope_backward(
        self, dy: GridTensor, heads: int, table: GridRotaryTable, positions: Ints, *, name: str
    ) -> GridTensor:
        """Rotate each head's halves by the negative angles."""
        return self._rope("vox_rope_backward", dy, heads, table, positions, name)

    def silu_gate_backward(
        self, dy: GridTensor, gate: GridTensor, up: GridTensor, *, name: str
    ) -> tuple[GridTensor, GridTensor]:
        """Gradients of gate and up in silu(gate) * up."""
        return self._gate_backward("vox_silu_gate_backward", dy, gate, up, name)

    def gelu_gate_backward(
        self, dy: GridTensor, gate: GridTensor, up: GridTensor, *, name: str
    ) -> tuple[GridTensor, GridTensor]:
        """Gradients of gate and up in gelu_tanh(gate) * up."""
        return self._gate_backward("vox_gelu_gate_backward", dy, gate, up, name)

    def softcap_backward(self, dy: GridTensor, x: GridTensor, cap: float, *, name: str) -> GridTensor:
        """Gradient of cap * tanh(x / cap)."""
        return self._elementwise("vox_softcap_backward", (dy, x), float(cap), name)

    def attention_saving(
        self, q: GridTensor, cache: GridKvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> AttentionSaved:
        """`attention`, with the m and l of every row and head."""
        saved = [self._new(q.shape[0], spec.heads) for _ in range(2)]
        out = self._attention(
            "vox_attention_saving", q, cache, layer, batch, spec, name, extra=tuple(x.buffer for x in saved)
        )
        return AttentionSaved(out, *saved)

    def attention_backward(
        self,
        dy: GridTensor,
        q: GridTensor,
        saved: AttentionSaved,
        cache: GridKvCache,
        layer: int,
        batch: Batch,
        spec: AttentionSpec,
        *,
        name: str,
    ) -> tuple[GridTensor, GridTensor, GridTensor]:
        """Gradients of q, k and v.

        Raises:
            ValueError: tensors that do not fit each other, or a sequence that does not begin at
                position 0 or has not all its rows in the batch.
        """
        self._check_attention(q, cache, spec, name)
        rows, _ = alike(name, dy=dy, q=q, out=saved.out)
        if alike(name, m=saved.m, l=saved.l) != (rows, spec.heads):
            raise ValueError(f"{name}: m {list(saved.m.shape)} is not [{rows}, {spec.heads}]")
        _check_whole(batch, name)
        return self._attention_gradients(dy, q, saved, cache, layer, batch, spec, name)

    def _attention_gradients(
        self,
        dy: GridTensor,
        q: GridTensor,
        saved: AttentionSaved,
        cache: GridKvCache,
        layer: int,
        batch: Batch,
        spec: AttentionSpec,
        name: str,
    ) -> tuple[GridTensor, GridTensor, GridTensor]:
        """`attention_backward` of arguments that fit each other."""
        rows, wide = q.shape
        items = _items(batch)
        narrow = spec.kv_heads * spec.head_dim
        k, v = self._taken(cache, layer, batch)
        args, deltas = self._attention_deltas(dy, saved, spec)
        turned_k, turned_v = self._turned(k, rows, narrow), self._turned(v, rows, narrow)
        turned_q, turned_dy = self._turned(q.buffer, rows, wide), self._turned(dy.buffer, rows, wide)
        dq, dk, dv = self._new(rows, wide), self._new(rows, narrow), self._new(rows, narrow)
        flags, of_rows = self._flags(name, rows), (saved.m.buffer, saved.l.buffer, deltas)
        places = self._ints(items)
        self._run(
            "vox_attention_backward_queries",
            (dy.buffer, q.buffer, *of_rows, k, turned_k, turned_v, places, dq.buffer, flags),
            args,
            (spec.heads * GROUP, len(items)),
        )
        self._run(
            "vox_attention_backward_keys",
            (dy.buffer, q.buffer, *of_rows, k, v, turned_q, turned_dy, places, dk.buffer, dv.buffer, flags),
            args,
            (spec.kv_heads * GROUP, len(items)),
        )
        return dq, dk, dv

    def _attention_deltas(
        self, dy: GridTensor, saved: AttentionSaved, spec: AttentionSpec
    ) -> tuple[bytes, Buffer]:
        """The constants of attention's backward, and delta of each row and head."""
        rows = dy.shape[0]
        args = constants(
            rows,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.window or 0,
            float(spec.scale),
            float(spec.softcap or 0.0),
        )
        deltas = self._new(rows, spec.heads).buffer
        self._run("vox_attention_deltas", (dy.buffer, saved.out.buffer, deltas), args, (rows * spec.heads, 1))
        return args, deltas

    def _taken(self, cache: GridKvCache, layer: int, batch: Batch) -> tuple[Buffer, Buffer]:
        """Keys and values of the batch's rows, out of the cache."""
        rows, width = len(batch.positions), cache.kv_heads * cache.head_dim
        k, v = self._device.empty(4 * rows * width), self._device.empty(4 * rows * width)
        self._run(
            "vox_kv_take",
            (cache.keys[layer], cache.values[layer], *self._places(batch), k, v),
            constants(cache.kv_heads, cache.head_dim, cache.stride, batch.block_tables.shape[1]),
            (width, rows),
        )
        return k, v

    def _turned(self, x: Buffer, rows: int, width: int) -> Buffer:
        out = self._device.empty(4 * rows * width)
        self._run("vox_turn", (x, out), constants(rows, width), (rows, width))
        return out

    def _gate_backward(
        self, kernel: str, dy: GridTensor, gate: GridTensor, up: GridTensor, name: str
    ) -> tuple[GridTensor, GridTensor]:
        rows, width = alike(name, dy=dy, gate=gate, up=up)
        dgate, dup = self._new(rows, width), self._new(rows, width)
        self._run(
            kernel,
            (dy.buffer, gate.buffer, up.buffer, dgate.buffer, dup.buffer, self._flags(name, rows)),
            constants(rows, width, 0.0),
            (rows * width, 1),
        )
        return dgate, dup


def _check_whole(batch: Batch, name: str) -> None:
    for sequence, (begin, end) in enumerate(zip(batch.starts, batch.starts[1:], strict=False)):
        if not np.array_equal(batch.positions[begin:end], np.arange(end - begin)):
            raise ValueError(
                f"{name}: the rows of sequence {sequence} are not its positions from 0 on; "
                "a backward pass needs whole sequences"
            )


def _items(batch: Batch) -> Ints:
    """Items of up to `_SIDE` rows of one sequence, in one block: [items, 4].

    Each is its first row, how many rows it has, and the sequence's first row and end.
    """
    items = [
        (first, min(_SIDE, end - first), begin, end)
        for begin, end in zip(batch.starts, batch.starts[1:], strict=False)
        for first in range(begin, end, _SIDE)
    ]
    return np.array(items, np.int32).reshape(-1, 4)
