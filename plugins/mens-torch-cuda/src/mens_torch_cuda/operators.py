"""Each operator on a GPU: the grid kernel, or a faster one with the same bits where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mens_core.grid_device import Buffer, Device, constants
from mens_core.grid_ops import GridKvCache, GridOps, GridTensor
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import AttentionSpec, Batch, Ints, StoredTensor
from mens_core.rotary_blocks import make_angles
from mens_torch_cuda.packed import PackedMatrix, can_be_packed, linear_launch, packed

__all__ = ["CudaOperators"]

_WIDEST_NORM = 64 * 128
"""kWidest chunks of kernels/packed.h."""
_WIDEST_HEAD = 256
"""kWidestHead of kernels/packed.h."""
_NARROW_BLOCK = 32


class CudaOperators(GridOps):
    """Grid kernels on a GPU; rotary tables are made on the host by integers."""

    def __init__(self, device: Device, *, facts: Mapping[str, Any]) -> None:
        super().__init__(device, make_angles)
        self._facts = dict(facts)

    def facts(self) -> dict[str, Any]:
        """Device, compiler and kernels."""
        return self._facts

    def load_matrix(self, stored: StoredTensor) -> Any:
        """Copy a weight and pack it, where there is a packed layout."""
        return self.take_matrix(super().load_matrix(stored))

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> GridKvCache:
        """Reserve blocks; by then the weights are loaded."""
        end_uploads = getattr(self._device, "end_uploads", None)
        if end_uploads is not None:
            end_uploads()
        return super().new_kv_cache(layers=layers, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks)

    def take_matrix(self, matrix: GridMatrix) -> Any:
        """Take a weight that lies on the device as it lies in a file."""
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
            constants(table.columns, 1.0 if scale is None else float(scale)),
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
        codes, scales = self._device.empty(rows * columns), self._device.empty(4 * rows * columns // block)
        across = columns if block == _NARROW_BLOCK else columns // block * GROUP
        self._run(f"vox_quantise_{block}_wide", (x.buffer, codes, scales), constants(columns), (across, rows))
        return codes, scales
