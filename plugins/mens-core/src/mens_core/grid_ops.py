"""The operators over the grid kernels: the same for every device that can launch them.

Shapes, memory and names are here; the arithmetic is `kernels/grid`, the device's part is
`grid_device.Device`. A lane may override an operator with a faster kernel that returns the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device, Launch, constants
from mens_core.grid_flags import RowFlags
from mens_core.grid_weights import GridMatrix, check_finite, load_matrix, stored_elements
from mens_core.kernel_source import GROUP
from mens_core.ops import BLOCK, AttentionSpec, Batch, Fault, Ints, Ops, StoredTensor

__all__ = ["GridKvCache", "GridOps", "GridTensor", "MakeAngles"]

MakeAngles = Callable[[npt.NDArray[np.uint64], int, int], npt.NDArray[np.float32]]
"""Cosines and sines [128, 2, pairs] of a block of positions, natively (docs/numerics.md, 7), from
frequencies [pairs, 2] (low and high half), the multiplier M and the block's first position."""

_STRIDE = 16
_FACTOR_BITS = 64


@dataclass(frozen=True, slots=True, eq=False)
class GridTensor:
    """A float32 array of a device."""

    buffer: Buffer
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class GridKvCache:
    """Per layer: keys [blocks, kv_heads, head_dim, 128], values [blocks, kv_heads, 128, stride]."""

    kv_heads: int
    head_dim: int
    stride: int
    keys: tuple[Buffer, ...]
    values: tuple[Buffer, ...]


class GridRotaryTable:
    """Blocks of 128 positions met so far, made on the host and copied as they are reached."""

    def __init__(
        self, make: MakeAngles, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> None:
        numerator, denominator = attention_factor or (1, 1)
        self._make = make
        self._factor = (numerator << _FACTOR_BITS) // denominator
        low = (1 << 64) - 1
        self._frequencies = np.array([[f & low, f >> 64] for f in frequencies], np.uint64)
        self.pairs = len(frequencies)
        self._blocks: dict[int, npt.NDArray[np.float32]] = {}
        self._on_device: tuple[Buffer, Buffer] | None = None

    def reach(self, device: Device, positions: Ints) -> tuple[Buffer, Buffer]:
        """Return (table, slots) that hold the blocks of these positions."""
        wanted = {int(block) for block in np.unique(positions // BLOCK)} - self._blocks.keys()
        for block in sorted(wanted):
            self._blocks[block] = self._make(self._frequencies, self._factor, block * BLOCK)
        if wanted or self._on_device is None:
            slots = np.full(max(self._blocks) + 1, -1, np.int32)
            for slot, block in enumerate(self._blocks):
                slots[block] = slot
            table = np.stack([*self._blocks.values()])
            self._on_device = (device.put(table), device.put(slots))
        return self._on_device


class GridOps(Ops):
    """The operator contract over a device."""

    def __init__(self, device: Device, make_angles: MakeAngles) -> None:
        self._device = device
        self._make_angles = make_angles
        self._watched = RowFlags(device)
        self._uploaded: dict[tuple[bytes, tuple[int, ...]], Buffer] = {}

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
        stride = -(-head_dim // _STRIDE) * _STRIDE
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

    def to_host(self, x: GridTensor) -> npt.NDArray[np.float32]:
        """Copy back."""
        return self._device.get(x.buffer, np.float32, x.shape)

    def take_faults(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first."""
        self._uploaded.clear()
        return self._watched.take()

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
        rows, width = x.shape
        if width != heads * 2 * table.pairs or len(positions) != rows:
            raise ValueError(f"{name}: x {x.shape}, {len(positions)} positions, {heads} heads do not fit")
        return self._rows(
            "vox_rope",
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
    ) -> GridTensor:
        if (q.shape[1], spec.kv_heads, spec.head_dim) != (
            spec.heads * spec.head_dim,
            cache.kv_heads,
            cache.head_dim,
        ):
            raise ValueError(f"{name}: q {q.shape} and the cache do not fit {spec}")
        return self._rows(
            kernel,
            (q.buffer, cache.keys[layer], cache.values[layer], *self._places(batch)),
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

    def add(self, a: GridTensor, b: GridTensor, *, name: str) -> GridTensor:
        """a + b."""
        return self._pair("vox_add", a, b, name)

    def silu_gate(self, gate: GridTensor, up: GridTensor, *, name: str) -> GridTensor:
        """silu(gate) * up."""
        return self._pair("vox_silu_gate", gate, up, name)

    def gelu_gate(self, gate: GridTensor, up: GridTensor, *, name: str) -> GridTensor:
        """gelu_tanh(gate) * up."""
        return self._pair("vox_gelu_gate", gate, up, name)

    def softcap(self, x: GridTensor, cap: float, *, name: str) -> GridTensor:
        """cap * tanh(x / cap)."""
        return self._rows("vox_softcap", (x.buffer,), x.shape, constants(x.shape[1], float(cap)), name)

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

    # --- choosing tokens -----------------------------------------------------------------------

    def penalise(
        self,
        logits: GridTensor,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        """Change one row in place."""
        count, (rows, width) = len(token_ids), logits.shape
        if not count == len(repetition) == len(subtract):
            raise ValueError(f"{count} ids, {len(repetition)} and {len(subtract)} penalties")
        if count and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < width:
            raise IndexError(f"penalise: a token id is not in [0, {width})")
        factors = self._device.put(np.ascontiguousarray(repetition, np.float32))
        offsets = self._device.put(np.ascontiguousarray(subtract, np.float32))
        self._run(
            "vox_penalise",
            (logits.buffer, self._ints(token_ids), factors, offsets, self._flags("penalise", rows)),
            constants(width, row, count),
            (count, 1),
        )

    def argmax(self, logits: GridTensor) -> Ints:
        """Highest logit of each row, the lowest id on ties."""
        rows, width = logits.shape
        out = self._device.empty(4 * rows)
        self._run("vox_argmax", (logits.buffer, out), constants(width), (rows * GROUP, 1))
        return self._device.get(out, np.int32, (rows,))

    def token_weights(self, logits: GridTensor, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        """floor(exp((x - max) / T) * 2^32) of one row."""
        rows, width = logits.shape
        most, out = self._device.empty(4 * rows), self._device.empty(8 * width)
        self._run("vox_row_max", (logits.buffer, most), constants(width), (rows * GROUP, 1))
        self._run(
            "vox_token_weights",
            (logits.buffer, most, out),
            constants(width, row, float(temperature)),
            (width, 1),
        )
        return self._device.get(out, np.uint64, (width,))

    def log_normaliser(self, logits: GridTensor) -> npt.NDArray[np.float32]:
        """m + log(sum of exp(x - m)) of each row."""
        rows, width = logits.shape
        out = self._device.empty(4 * rows)
        self._run(
            "vox_log_normaliser",
            (logits.buffer, out, self._flags("log_normaliser", rows)),
            constants(width),
            (rows * GROUP, 1),
        )
        return self._device.get(out, np.float32, (rows,))

    # --- launches ------------------------------------------------------------------------------

    def _run(self, kernel: str, buffers: tuple[Buffer, ...], args: bytes, threads: tuple[int, int]) -> None:
        if threads[0] and threads[1]:
            self._device.launch(Launch(kernel, buffers, args, threads))

    def _rows(
        self,
        kernel: str,
        buffers: tuple[Buffer, ...],
        shape: tuple[int, ...],
        args: bytes,
        name: str,
        across: int | None = None,
    ) -> GridTensor:
        """Run a kernel that writes `shape` and flags its rows, `across` threads a row."""
        rows, width = shape
        out = GridTensor(self._device.empty(4 * rows * width), shape)
        flags = self._flags(name, rows)
        self._run(kernel, (*buffers, out.buffer, flags), args, (width if across is None else across, rows))
        return out

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
        return self._rows(
            f"vox_linear_{weight.format}",
            (*activations, weight.buffer),
            (rows, weight.rows),
            constants(weight.rows, weight.columns),
            name,
        )

    def _check_ids(self, rows: int, token_ids: Ints, name: str) -> None:
        if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < rows:
            raise IndexError(f"{name}: a token id is not in [0, {rows})")

    def _pair(self, kernel: str, a: GridTensor, b: GridTensor, name: str) -> GridTensor:
        if a.shape != b.shape:
            raise ValueError(f"{name}: {a.shape} and {b.shape} differ")
        return self._rows(kernel, (a.buffer, b.buffer), a.shape, constants(a.shape[1], 0.0), name)

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

    def _flags(self, name: str, rows: int) -> Buffer:
        return self._watched.reserve(name, rows)

    def _ints(self, array: npt.NDArray[Any]) -> Buffer:
        """Copy indices there, each once a step: every layer asks for the same positions and tables."""
        ints = np.ascontiguousarray(array, np.int32)
        key = (ints.tobytes(), ints.shape)
        if key not in self._uploaded:
            self._uploaded[key] = self._device.put(ints)
        return self._uploaded[key]

    def _places(self, batch: Batch) -> tuple[Buffer, Buffer, Buffer]:
        """Positions, sequence of each row, block tables."""
        sequences = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
        return self._ints(batch.positions), self._ints(sequences), self._ints(batch.block_tables)
