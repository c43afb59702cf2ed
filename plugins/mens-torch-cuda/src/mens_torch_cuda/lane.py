"""The operators on a GPU: the grid kernels, and faster ones with the same bits where there are any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy.typing as npt

from mens_core.grid_device import Buffer, Device, constants
from mens_core.grid_flags import RowFlags
from mens_core.grid_ops import GridKvCache, GridOps, GridRotaryTable, GridTensor
from mens_core.kernel_source import GROUP
from mens_core.ops import AttentionSpec, Batch, Ints, ServedLayer, StoredTensor
from mens_core.rotary_blocks import make_angles
from mens_torch_cuda.packed import PackedMatrix, can_be_packed, linear_launch, packed
from mens_torch_cuda.replay import (
    MOST_ROWS,
    Capturing,
    Places,
    Recording,
    Recordings,
    UnrecordableError,
    padded_batch,
)
from vox_plugin_api.backend import BackendError

__all__ = ["CudaOps"]

_WIDEST_NORM = 64 * 128
"""kWidest chunks of kernels/packed.h."""
_WIDEST_HEAD = 256
"""kWidestHead of kernels/packed.h."""
_NARROW_BLOCK = 32


@dataclass(slots=True)
class _Recorded:
    """What is being recorded: the batch whose rows stand for others, and what the operators asked for."""

    batch: Batch
    places: Places
    tables: dict[int, tuple[GridRotaryTable, tuple[Buffer, Buffer]]] = field(default_factory=dict)


class CudaOps(GridOps):
    """Grid kernels on a GPU; rotary tables are made on the host by integers."""

    def __init__(self, device: Device, *, facts: Mapping[str, Any]) -> None:
        super().__init__(device, make_angles)
        self._facts = dict(facts)
        self._recordings = Recordings()
        self._recorded: _Recorded | None = None
        self._tables: list[GridRotaryTable] = []

    def facts(self) -> dict[str, Any]:
        """Device, compiler and kernels."""
        return self._facts

    @property
    def recordings(self) -> int:
        """How many shapes of step are kept as CUDA graphs."""
        return len(self._recordings)

    def load_matrix(self, stored: StoredTensor) -> Any:
        """Copy a weight and pack it, where there is a packed layout."""
        matrix = super().load_matrix(stored)
        return packed(self._device, matrix) if can_be_packed(matrix) else matrix

    def embed(self, table: Any, token_ids: Ints, scale: float | None, *, name: str) -> GridTensor:
        """Rows of `table`, dequantised, times `scale`."""
        if not isinstance(table, PackedMatrix):
            return super().embed(table, token_ids, scale, name=name)
        self._check_ids(table.rows, token_ids, name)
        return self._rows(
            f"vox_embed_packed_{table.format}",
            (*table.buffers, self._ints(token_ids)),
            (len(token_ids), table.columns),
            constants(table.padded, table.columns, 1.0 if scale is None else float(scale)),
            name,
        )

    def _launch_linear(
        self, activations: tuple[Buffer, ...], rows: int, weight: Any, name: str
    ) -> GridTensor:
        if not isinstance(weight, PackedMatrix):
            return super()._launch_linear(activations, rows, weight, name)
        kernel, args, threads = linear_launch(weight, rows)
        out = GridTensor(self._device.empty(4 * rows * weight.rows), (rows, weight.rows))
        buffers = (*activations, *weight.buffers, out.buffer, self._flags(name, rows))
        self._run(kernel, buffers, args, threads)
        return out

    def head_norm(
        self, x: GridTensor, weight: GridTensor, heads: int, eps: float, *, name: str
    ) -> GridTensor:
        """`rms_norm` of each head."""
        (width,) = weight.shape
        if width > _WIDEST_NORM or x.shape[1] != heads * width:
            return super().head_norm(x, weight, heads, eps, name=name)
        return self._rows(
            "vox_norm_staged",
            (x.buffer, weight.buffer),
            x.shape,
            constants(heads, width, float(eps)),
            name,
            across=heads * GROUP,
        )

    def attention(
        self, q: GridTensor, cache: GridKvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> GridTensor:
        """Causal attention over the KV blocks of each row's sequence."""
        kernel = "vox_attention_staged" if spec.head_dim <= _WIDEST_HEAD else "vox_attention"
        return self._attention(kernel, q, cache, layer, batch, spec, name)

    def _quantised(self, x: GridTensor, block: int) -> tuple[Buffer, Buffer]:
        rows, columns = x.shape
        if block != _NARROW_BLOCK:
            return super()._quantised(x, block)
        codes, scales = self._device.empty(rows * columns), self._device.empty(4 * rows * columns // block)
        self._run("vox_quantise_32_wide", (x.buffer, codes, scales), constants(columns), (columns, rows))
        return codes, scales

    # --- a step's layers at once -----------------------------------------------------------------

    def run_layers(
        self, x: GridTensor, layers: Sequence[ServedLayer], batch: Batch, cache: GridKvCache
    ) -> GridTensor:
        """The layers one after another; a shape of step that came before is replayed as a CUDA graph."""
        rows = len(batch.positions)
        if not hasattr(self._device, "capture") or not 0 < rows <= MOST_ROWS:
            return self._run_each(x, layers, batch, cache)
        device = cast(Capturing, self._device)
        batch = padded_batch(batch)
        key = (id(layers), x.shape, batch.block_tables.shape)
        if not self._recordings.is_worth_it(key):
            return self._run_each(x, layers, batch, cache)
        recording = self._recordings.find(key)
        if recording is None or not recording.is_current(device, batch.positions, cache):
            try:
                recording = self._record(device, x, layers, batch, cache)
            except (UnrecordableError, BackendError):
                # What can't be recorded is run; what has no room then says so itself.
                self._recordings.refuse(key)
                return self._run_each(x, layers, batch, cache)
            self._recordings.keep(key, recording)
        out = recording.run(device, x, batch)
        self._watched.adopt(recording.flags)
        return out

    def _run_each(
        self, x: GridTensor, layers: Sequence[ServedLayer], batch: Batch, cache: GridKvCache
    ) -> GridTensor:
        out: GridTensor = super().run_layers(x, layers, batch, cache)
        return out

    def _record(
        self,
        device: Capturing,
        x: GridTensor,
        layers: Sequence[ServedLayer],
        batch: Batch,
        cache: GridKvCache,
    ) -> Recording:
        for table in self._tables:
            table.reach(device, batch.positions)
        recorded = _Recorded(batch, Places.reserve(device, batch))
        static = GridTensor(device.empty(4 * x.shape[0] * x.shape[1]), x.shape)
        watched, self._watched = self._watched, RowFlags(device)
        self._recorded = recorded
        try:
            out, start = device.capture(lambda: self._run_each(static, layers, batch, cache))
            flags = self._watched
        finally:
            self._watched, self._recorded = watched, None
        tables = tuple(recorded.tables.values())
        return Recording(layers, cache, static, recorded.places, out, flags, tables, start)

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> GridRotaryTable:
        """Return a table that grows by blocks of 128 positions as they are reached."""
        table = super().rotary_table(frequencies, attention_factor)
        self._tables.append(table)
        return table

    def _ints(self, array: npt.NDArray[Any]) -> Buffer:
        if self._recorded is None:
            return super()._ints(array)
        if array is self._recorded.batch.positions:
            return self._recorded.places.positions
        raise UnrecordableError("indices that are not the batch's positions")

    def _places(self, batch: Batch) -> tuple[Buffer, Buffer, Buffer]:
        if self._recorded is None:
            return super()._places(batch)
        places = self._recorded.places
        if batch is not self._recorded.batch:
            raise UnrecordableError("another batch")
        return places.positions, places.sequences, places.block_tables

    def rope(
        self, x: GridTensor, heads: int, table: GridRotaryTable, positions: Ints, *, name: str
    ) -> GridTensor:
        """Rotate each head's halves."""
        if self._recorded is not None:
            self._recorded.tables[id(table)] = (table, table.reach(self._device, positions))
        return super().rope(x, heads, table, positions, name=name)
