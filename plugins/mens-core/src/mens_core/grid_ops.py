"""The operators over the grid kernels: the same for every device that can launch them.

Shapes and names are here; the arithmetic is `kernels/grid`, the device's part is
`grid_device.Device`. A lane may override an operator with a faster kernel that returns the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mens_core.grid_choosing import GridChoosing
from mens_core.grid_device import Buffer, Device, constants
from mens_core.grid_tensors import VALUE_STRIDE, GridKvCache, GridRotaryTable, GridTensor, MakeAngles
from mens_core.grid_weights import GridMatrix, check_finite, load_matrix, stored_elements
from mens_core.kernel_source import GROUP
from mens_core.ops import BLOCK, AttentionSpec, Batch, Ints, Ops, StoredTensor

__all__ = ["GridKvCache", "GridOps", "GridRotaryTable", "GridTensor", "MakeAngles", "TALL"]

TALL = 16
"""Rows of a product that a group makes side by side: kTall of args.h."""


class GridOps(GridChoosing, Ops):
    """The operator contract over a device."""

    def __init__(self, device: Device, make_angles: MakeAngles) -> None:
        super().__init__(device)
        self._make_angles = make_angles

    # --- memory ------------------------------------------------------------------------------

    def load_matrix(self, stored: StoredTensor) -> GridMatrix:
        """Copy a weight as it lies in the file."""
        return load_matrix(self._device, stored)

    def load_vector(self, stored: StoredTensor, *, plus_one: bool = False) -> GridTensor:
        """Take a float vector as f32."""
        source = stored_elements(stored)
        check_finite(source, stored)
        count = source.size
        out = GridTensor(self._device.empty(4 * count), (count,))
        self._run(
            f"vox_widen_{stored.format}",
            (self._device.put(source), out.buffer),
            constants(count, int(plus_one), 1.0),
            (count, 1),
        )
        return out

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> GridKvCache:
        """Reserve blocks, in the layout of the CPU lane."""
        stride = -(-head_dim // VALUE_STRIDE) * VALUE_STRIDE
        cells = 4 * blocks * kv_heads * BLOCK
        return GridKvCache(
            kv_heads=kv_heads,
            head_dim=head_dim,
            stride=stride,
            keys=tuple(self._device.zeros(cells * head_dim) for _ in range(layers)),
            values=tuple(self._device.zeros(cells * stride) for _ in range(layers)),
        )

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> GridRotaryTable:
        """Return a table that grows by blocks of 128 positions as they are reached."""
        return GridRotaryTable(self._make_angles, frequencies, attention_factor)

    # --- operators ---------------------------------------------------------------------------

    def embed(self, table: GridMatrix, token_ids: Ints, scale: float | None, *, name: str) -> GridTensor:
        """Rows of `table`, dequantised, times `scale`."""
        self._check_ids(table.rows, token_ids, name)
        return self._rows(
            f"vox_embed_{table.format}",
            (table.buffer, self._ints(token_ids)),
            (len(token_ids), table.columns),
            constants(table.columns, 1.0 if scale is None else float(scale)),
            name,
        )

    def linear(self, x: GridTensor, weight: GridMatrix, *, name: str) -> GridTensor:
        """x W^T."""
        return self.linear_many(x, (weight,), names=(name,))[0]

    def linear_many(
        self, x: GridTensor, weights: Sequence[GridMatrix], *, names: Sequence[str]
    ) -> list[GridTensor]:
        """`linear` with several weights; the activations are quantised once per block size."""
        activations: dict[int, tuple[Buffer, ...]] = {0: (x.buffer,)}
        return [
            self._linear(x, weight, activations, name) for weight, name in zip(weights, names, strict=True)
        ]

    def rms_norm(self, x: GridTensor, weight: GridTensor, eps: float, *, name: str) -> GridTensor:
        """Each row over its root mean square, times `weight`."""
        return self.head_norm(x, weight, 1, eps, name=name)

    def head_norm(
        self, x: GridTensor, weight: GridTensor, heads: int, eps: float, *, name: str
    ) -> GridTensor:
        """`rms_norm` of each head."""
        (width,) = weight.shape
        if x.shape[1] != heads * width:
            raise ValueError(f"{name}: x {x.shape} is not {heads} heads of {width}")
        return self._rows(
            "vox_norm",
            (x.buffer, weight.buffer),
            x.shape,
            constants(heads, width, float(eps)),
            name,
            across=heads * GROUP,
        )

    def rope(
        self, x: GridTensor, heads: int, table: GridRotaryTable, positions: Ints, *, name: str
    ) -> GridTensor:
        """Rotate each head's halves."""
        return self._rope("vox_rope", x, heads, table, positions, name)

    def _rope(
        self,
        kernel: str,
        x: GridTensor,
        heads: int,
        table: GridRotaryTable,
        positions: Ints,
        name: str,
    ) -> GridTensor:
        rows, width = x.shape
        if width != heads * 2 * table.pairs or len(positions) != rows:
            raise ValueError(f"{name}: x {x.shape}, {len(positions)} positions, {heads} heads do not fit")
        return self._rows(
            kernel,
            (x.buffer, *table.reach(self._device, positions), self._ints(positions)),
            x.shape,
            constants(heads, table.pairs),
            name,
            across=heads * table.pairs,
        )

    def kv_append(self, cache: GridKvCache, layer: int, k: GridTensor, v: GridTensor, batch: Batch) -> None:
        """Store k and v at their rows' positions."""
        rows, width = len(batch.positions), cache.kv_heads * cache.head_dim
        if k.shape != (rows, width) or v.shape != (rows, width):
            raise ValueError(f"layer {layer}: k {k.shape}, v {v.shape} are not [{rows}, {width}]")
        self._run(
            "vox_kv_append",
            (k.buffer, v.buffer, *self._places(batch), cache.keys[layer], cache.values[layer]),
            constants(cache.kv_heads, cache.head_dim, cache.stride, batch.block_tables.shape[1]),
            (width, rows),
        )

    def attention(
        self, q: GridTensor, cache: GridKvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> GridTensor:
        """Causal attention over the KV blocks of each row's sequence."""
        return self._attention("vox_attention", q, cache, layer, batch, spec, name)

    def _attention(
        self,
        kernel: str,
        q: GridTensor,
        cache: GridKvCache,
        layer: int,
        batch: Batch,
        spec: AttentionSpec,
        name: str,
        *,
        extra: tuple[Buffer, ...] = (),
    ) -> GridTensor:
        """`extra`: what the kernel writes beside its result."""
        self._check_attention(q, cache, spec, name)
        return self._rows(
            kernel,
            (q.buffer, cache.keys[layer], cache.values[layer], *self._places(batch), *extra),
            q.shape,
            constants(
                spec.heads,
                spec.kv_heads,
                spec.head_dim,
                cache.stride,
                batch.block_tables.shape[1],
                spec.window or 0,
                float(spec.scale),
                float(spec.softcap or 0.0),
            ),
            name,
            across=spec.heads * GROUP,
        )

    def _check_attention(self, q: GridTensor, cache: GridKvCache, spec: AttentionSpec, name: str) -> None:
        if (q.shape[1], spec.kv_heads, spec.head_dim) != (
            spec.heads * spec.head_dim,
            cache.kv_heads,
            cache.head_dim,
        ):
            raise ValueError(f"{name}: q {q.shape} and the cache do not fit {spec}")

    def add(self, a: GridTensor, b: GridTensor, *, name: str) -> GridTensor:
        """a + b."""
        return self._elementwise("vox_add", (a, b), 0.0, name)

    def add_scaled(self, y: GridTensor, x: GridTensor, factor: float, *, name: str) -> GridTensor:
        """y + x * factor: an adapter's update, in service and in training."""
        return self._elementwise("vox_add_scaled", (y, x), float(factor), name)

    def silu_gate(self, gate: GridTensor, up: GridTensor, *, name: str) -> GridTensor:
        """silu(gate) * up."""
        return self._elementwise("vox_silu_gate", (gate, up), 0.0, name)

    def gelu_gate(self, gate: GridTensor, up: GridTensor, *, name: str) -> GridTensor:
        """gelu_tanh(gate) * up."""
        return self._elementwise("vox_gelu_gate", (gate, up), 0.0, name)

    def softcap(self, x: GridTensor, cap: float, *, name: str) -> GridTensor:
        """cap * tanh(x / cap)."""
        return self._elementwise("vox_softcap", (x,), float(cap), name)

    def take_rows(self, x: GridTensor, rows: Ints) -> GridTensor:
        """x[rows], copied."""
        shape = (len(rows), x.shape[1])
        out = GridTensor(self._device.empty(4 * shape[0] * shape[1]), shape)
        self._run(
            "vox_take_rows",
            (x.buffer, self._ints(rows), out.buffer),
            constants(shape[1]),
            (shape[1], shape[0]),
        )
        return out

    # --- one launch of several ---------------------------------------------------------------------

    def _linear(
        self, x: GridTensor, weight: Any, activations: dict[int, tuple[Buffer, ...]], name: str
    ) -> GridTensor:
        """One of several products with the same rows; what they share is kept in `activations`, by block."""
        rows, columns = x.shape
        if columns != weight.columns:
            raise ValueError(f"{name}: x [{rows}, {columns}] does not fit [{weight.rows}, {weight.columns}]")
        if weight.block not in activations:
            activations[weight.block] = self._quantised(x, weight.block)
        return self._launch_linear(activations[weight.block], rows, weight, name)

    def _launch_linear(
        self, activations: tuple[Buffer, ...], rows: int, weight: Any, name: str
    ) -> GridTensor:
        if rows >= TALL and weight.rows >= GROUP:
            out = self._new(rows, weight.rows)
            self._run(
                f"vox_linear_tall_{weight.format}",
                (*activations, weight.buffer, out.buffer, self._flags(name, rows)),
                constants(rows, weight.columns, weight.rows, 0, weight.columns),
                (weight.rows, -(-rows // TALL)),
            )
            return out
        return self._rows(
            f"vox_linear_{weight.format}",
            (*activations, weight.buffer),
            (rows, weight.rows),
            constants(weight.rows, weight.columns),
            name,
        )

    def _quantised(self, x: GridTensor, block: int) -> tuple[Buffer, Buffer]:
        rows, columns = x.shape
        codes, scales = self._device.empty(rows * columns), self._device.empty(4 * rows * columns // block)
        self._run(
            f"vox_quantise_{block}",
            (x.buffer, codes, scales),
            constants(columns),
            (columns // block, rows),
        )
        return codes, scales

    def _check_ids(self, rows: int, token_ids: Ints, name: str) -> None:
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < rows:
            raise IndexError(f"{name}: a token id is not in [0, {rows})")
