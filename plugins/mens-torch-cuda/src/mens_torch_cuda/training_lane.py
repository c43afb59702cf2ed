"""The CUDA lane that can also train, and serve adapters: the grid kernels of training beside its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mens_core.grid_device import Buffer, Device, constants
from mens_core.grid_ops import TALL, GridKvCache, GridTensor
from mens_core.kernel_source import GROUP
from mens_core.ops import BLOCK, AttentionSpec, Batch, Fault
from mens_core.training_ops import AttentionSaved
from mens_torch_cuda.adapter_lane import THINNEST, CudaAdapterOps
from mens_torch_cuda.lane import CudaOps
from mens_torch_cuda.packed import PackedMatrix
from mens_torch_cuda.pairs import (
    Piece,
    are_whole,
    channel_groups,
    key_groups,
    longest_of,
    pair_bytes,
    pair_constants,
    pair_tiles,
    pieces,
    stride_of,
)
from mens_torch_cuda.tile_choice import broad_tile

__all__ = ["CudaTrainingOps"]

_HALVES, _CODES = ("f16", "bf16"), "q8_0"
"""Packed formats that kernels/broad.h has, and the one that goes forward by kernels/tiles.h."""
_QUAD = 4
_TILE = 64
"""Rows and outputs of a group of `vox_step_tiles_q8_0_Many`."""
_SLOTS, _CHUNK = 40, 128
"""Chunks of a group of kernels/heads.h, and terms of a chunk."""


class CudaTrainingOps(CudaAdapterOps):
    """Every operator of `TrainingOps` on a GPU."""

    rows_at_once = 4096
    logit_rows_at_once = 1024
    layers_between_looks = 8

    def __init__(self, device: Device, serving: CudaOps) -> None:
        """Take over the weights and rotary tables of a lane on the same device."""
        super().__init__(device, facts=serving.facts())
        # A table that it made is one that a recording must know before it begins.
        self._tables = serving._tables

    def workspace_bytes(self, *, lengths: Sequence[int], widest: int, kv_heads: int, head_dim: int) -> int:
        """Keys and values of the rows, deltas, and P and dS of some heads; or what the grid kernels take."""
        rows, longest = sum(lengths), max(lengths)
        pairs = pair_bytes(kv_heads, rows, longest)
        if not pairs or head_dim % _QUAD:
            return super().workspace_bytes(
                lengths=lengths, widest=widest, kv_heads=kv_heads, head_dim=head_dim
            )
        attention = pairs + 4 * rows * (2 * kv_heads * head_dim + widest // head_dim)
        return max(attention, self._piece_bytes(widest))

    def take_faults(self) -> list[Fault]:
        """Return what was not finite since the last call; flags come to the host where there is one."""
        are_zero = getattr(self._device, "are_zero", None)
        if self._nodes is not None or are_zero is None or not are_zero(self._watched.parts()):
            return super().take_faults()
        self._uploaded.clear()
        self._watched.forget()
        return []

    # --- products --------------------------------------------------------------------------------

    def _launch_linear_backward(self, dy: GridTensor, weight: Any, name: str) -> GridTensor:
        """Packed weights go backward as they lie; those whose outputs are no quads, piece by piece."""
        if weight.rows % _QUAD:
            return super()._launch_linear_backward(dy, weight, name)
        if isinstance(weight, PackedMatrix) and weight.format in (*_HALVES, _CODES):
            return self._broad(f"back_{weight.format}", dy.buffer, dy.shape, weight, weight.columns, name)
        if weight.format == "f32" and weight.columns <= THINNEST:
            return self._thin("back", dy.buffer, dy.shape, weight, weight.columns, name)
        return super()._launch_linear_backward(dy, weight, name)

    def _launch_linear(
        self, activations: tuple[Buffer, ...], rows: int, weight: Any, name: str
    ) -> GridTensor:
        shape = (rows, weight.columns)
        if rows < TALL:
            return super()._launch_linear(activations, rows, weight, name)
        if isinstance(weight, PackedMatrix):
            if weight.format == _CODES:
                return self._tiled(activations, rows, weight, name)
            if weight.format in _HALVES and weight.rows % _QUAD == 0:
                kernel = f"forth_{weight.format}"
                return self._broad(kernel, activations[0], shape, weight, weight.rows, name)
        elif weight.format == "f32" and weight.rows <= THINNEST and weight.columns % _QUAD == 0:
            return self._thin("forth", activations[0], shape, weight, weight.rows, name)
        return super()._launch_linear(activations, rows, weight, name)

    def _broad(
        self, kernel: str, x: Buffer, shape: tuple[int, ...], weight: PackedMatrix, columns: int, name: str
    ) -> GridTensor:
        """A product of rows [rows, terms] with a weight, by kernels/broad.h."""
        rows, terms = shape
        out = self._new(rows, columns)
        tile = broad_tile(rows, columns)
        self._run(
            f"vox_broad_{kernel}_{tile.name}",
            (x, weight.buffers[0], weight.buffers[-1], out.buffer, self._flags(name, rows)),
            constants(rows, terms, columns),
            (-(-columns // tile.outputs) * GROUP, -(-rows // tile.rows)),
            tile.shared,
        )
        return out

    def _tiled(
        self, activations: tuple[Buffer, ...], rows: int, weight: PackedMatrix, name: str
    ) -> GridTensor:
        """A product of int8 codes with Q8_0 weights on tensor cores."""
        out, flags = self._new(rows, weight.rows), self._flags(name, rows)
        # For weights beside this one, of which there are none.
        none = activations[0]
        of_weight = [x for buffer in weight.buffers for x in (buffer, none, none)]
        self._run(
            "vox_step_tiles_q8_0_Many",
            (*activations, *of_weight, none, out.buffer, none, none, flags, none, none),
            constants(weight.rows, 0, 0, weight.columns, rows, 0),
            (-(-weight.rows // _TILE) * GROUP, -(-rows // _TILE)),
        )
        return out

    # --- norms -----------------------------------------------------------------------------------

    def head_norm(self, x: Any, weight: GridTensor, heads: int, eps: float, *, name: str) -> Any:
        """`rms_norm` of each head."""
        (width,) = weight.shape
        rows = x.shape[0]
        if self._nodes is not None or rows < TALL or width > _SLOTS * _CHUNK or x.shape[1] != heads * width:
            return super().head_norm(x, weight, heads, eps, name=name)
        return self._heads("vox_heads_norm", (x, weight), heads, width, eps, name)

    def head_norm_backward(
        self, dy: GridTensor, x: GridTensor, weight: GridTensor, heads: int, eps: float, *, name: str
    ) -> GridTensor:
        """Gradient of `head_norm` with respect to x."""
        (width,) = weight.shape
        if dy.shape != x.shape or x.shape[1] != heads * width or width > _SLOTS * _CHUNK:
            return super().head_norm_backward(dy, x, weight, heads, eps, name=name)
        return self._heads("vox_heads_norm_backward", (dy, x, weight), heads, width, eps, name)

    def _heads(
        self, kernel: str, inputs: tuple[GridTensor, ...], heads: int, width: int, eps: float, name: str
    ) -> GridTensor:
        """A kernel of kernels/heads.h whose output is like its first input."""
        rows, wide = inputs[0].shape
        out = self._new(rows, wide)
        buffers = (*(tensor.buffer for tensor in inputs), out.buffer, self._flags(name, rows))
        self._run(
            kernel,
            buffers,
            constants(rows * heads, heads, width, float(eps)),
            _head_groups(rows * heads, width),
        )
        return out

    # --- attention -------------------------------------------------------------------------------

    def attention(
        self, q: Any, cache: GridKvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Any:
        """Causal attention; of whole sequences, by products over pairs."""
        made = () if self._nodes is not None else self._pieces(batch, spec)
        if not made:
            return super().attention(q, cache, layer, batch, spec, name=name)
        return self._attended(q, cache, layer, batch, spec, made, name).out

    def attention_saving(
        self, q: GridTensor, cache: GridKvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> AttentionSaved:
        """`attention`, with the m and l of every row and head."""
        made = self._pieces(batch, spec)
        if not made:
            return super().attention_saving(q, cache, layer, batch, spec, name=name)
        return self._attended(q, cache, layer, batch, spec, made, name)

    def _pieces(self, batch: Batch, spec: AttentionSpec) -> tuple[Piece, ...]:
        """None where products over pairs won't do."""
        if len(batch.positions) < TALL or spec.head_dim % _QUAD or not are_whole(batch):
            return ()
        return tuple(pieces(spec, len(batch.positions), longest_of(batch)))

    def _attended(
        self,
        q: GridTensor,
        cache: GridKvCache,
        layer: int,
        batch: Batch,
        spec: AttentionSpec,
        made: Sequence[Piece],
        name: str,
    ) -> AttentionSaved:
        self._check_attention(q, cache, spec, name)
        rows, longest = q.shape[0], longest_of(batch)
        k, v = self._taken(cache, layer, batch)
        positions, places = self._ints(batch.positions), pair_tiles(batch)
        tiles, count, blocks = self._ints(places), len(places), -(-stride_of(longest) // BLOCK)
        together = max(piece.together for piece in made)
        pairs = self._device.empty(4 * rows * stride_of(longest) * together)
        block_m, block_l, shares = (
            self._device.empty(4 * rows * spec.heads * blocks * each) for each in (1, 1, 2)
        )
        saved_m, saved_l = self._new(rows, spec.heads), self._new(rows, spec.heads)
        out, flags = self._new(*q.shape), self._flags(name, rows)
        for piece in made:
            of_blocks = -(-rows * piece.together * blocks // _SLOTS) * GROUP
            for kernel, buffers, threads in (
                ("products", (q.buffer, k, tiles, pairs), _of_keys(longest, piece, count)),
                ("weights", (positions, pairs, block_m, block_l), (of_blocks, 1)),
                (
                    "ends",
                    (positions, block_m, block_l, shares, saved_m.buffer, saved_l.buffer),
                    (rows * piece.together, 1),
                ),
                (
                    "attend",
                    (pairs, v, tiles, shares, saved_l.buffer, out.buffer, flags),
                    _of_channels(spec, piece, count),
                ),
            ):
                args = pair_constants(rows, longest, spec, piece)
                self._run(f"vox_pairs_{kernel}", buffers, args, threads)
        return AttentionSaved(out, saved_m, saved_l)

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
        """By products over pairs; where those of one head are too many, by the grid kernels."""
        made = self._pieces(batch, spec)
        if not made:
            return super()._attention_gradients(dy, q, saved, cache, layer, batch, spec, name)
        rows, wide = q.shape
        longest, narrow = longest_of(batch), spec.kv_heads * spec.head_dim
        k, v = self._taken(cache, layer, batch)
        deltas = self._device.empty(4 * rows * spec.heads)
        self._run(
            "vox_heads_deltas",
            (dy.buffer, saved.out.buffer, deltas),
            constants(rows * spec.heads, spec.heads, spec.head_dim, 0.0),
            _head_groups(rows * spec.heads, spec.head_dim),
        )
        places = pair_tiles(batch)
        tiles, count = self._ints(places), len(places)
        of_pairs = 4 * rows * stride_of(longest) * max(piece.together for piece in made)
        shares, slopes = self._device.empty(of_pairs), self._device.empty(of_pairs)
        dq, dk, dv = self._new(rows, wide), self._new(rows, narrow), self._new(rows, narrow)
        flags, of_rows = self._flags(name, rows), (saved.m.buffer, saved.l.buffer, deltas)
        for piece in made:
            args = pair_constants(rows, longest, spec, piece)
            of_keys, of_channels = _of_keys(longest, piece, count), _of_channels(spec, piece, count)
            for kernel, buffers, threads in (
                ("products", (q.buffer, k, tiles, shares), of_keys),
                ("gradients", (dy.buffer, v, *of_rows, tiles, shares, slopes), of_keys),
                ("queries", (slopes, k, tiles, dq.buffer, flags), of_channels),
                ("values", (shares, dy.buffer, tiles, dv.buffer, flags), of_channels),
                ("keys", (slopes, q.buffer, tiles, dk.buffer, flags), of_channels),
            ):
                self._run(f"vox_pairs_{kernel}", buffers, args, threads)
        return dq, dk, dv


def _of_keys(longest: int, piece: Piece, tiles: int) -> tuple[int, int]:
    """Threads over the heads of a piece beside keys, and tiles of rows."""
    return key_groups(longest) * piece.together * GROUP, tiles


def _of_channels(spec: AttentionSpec, piece: Piece, tiles: int) -> tuple[int, int]:
    """Threads over the heads of a piece beside channels, and tiles of rows."""
    return channel_groups(spec.head_dim) * piece.together * GROUP, tiles


def _head_groups(units: int, width: int) -> tuple[int, int]:
    """Threads of kernels/heads.h for so many heads."""
    together = _SLOTS // -(-width // _CHUNK)
    return -(-units // together) * GROUP, 1
