"""Adapters on the CUDA lane: products of which one side is thin, and sums over examples and over tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from mens_core.grid_device import Buffer, constants
from mens_core.grid_ops import GridTensor
from mens_core.grid_tensors import GridExamples, GridParts
from mens_core.grid_training_ops import GridTrainingOps
from mens_core.grid_update_ops import places_of
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import BLOCK, Ints
from mens_torch_cuda.lane import CudaOps

__all__ = ["THINNEST", "CudaAdapterOps"]

THINNEST = 64
"""Up to how many outputs kernels/thin.h is worth its while."""
_THIN, _THIN_ROWS = 8, 32
"""Outputs and rows of a group there."""
_ENOUGH = 256
"""Groups of products that are enough to take wider ones."""
_UPDATES, _UPDATE_COLUMNS, _UPDATE_ROWS = (8, 16), 128, 64
"""Terms that `vox_update_*` are made for, at most; columns and rows of a group."""
_TREES = (2, 4, 8)
"""Leaves that `vox_tree_*` are made for."""
_QUAD = 4


class CudaAdapterOps(CudaOps, GridTrainingOps):
    """The operators of adapters, in fewer and wider launches than the grid kernels'."""

    def _thin(
        self, kernel: str, x: Buffer, shape: tuple[int, ...], weight: GridMatrix, outputs: int, name: str
    ) -> GridTensor:
        """A product of rows with few outputs, by kernels/thin.h."""
        rows, terms = shape
        out = self._new(rows, outputs)
        self._run(
            f"vox_thin_{kernel}",
            (x, weight.buffer, out.buffer, self._flags(name, rows)),
            constants(rows, terms, outputs),
            (-(-outputs // _THIN) * GROUP, -(-rows // _THIN_ROWS)),
        )
        return out

    def example_products(self, a: GridTensor, b: GridTensor, starts: Ints, *, name: str) -> list[GridTensor]:
        """a^T b of each example's rows."""
        p, q = a.shape[1], b.shape[1]
        if a.shape[0] != b.shape[0] or min(p, q) > THINNEST or max(p, q) % _QUAD:
            return super().example_products(a, b, starts, name=name)
        # Few columns a group where groups are few.
        groups = -(-max(p, q) // GROUP) * -(-min(p, q) // _THIN) * (len(starts) - 1)
        each = next((each for each in (4, 2) if groups * 4 // each >= _ENOUGH), 1)
        kernel = f"vox_thin_products_{each}"
        return self._example_products(kernel, _THIN, a, b, starts, name, columns=32 * each)

    def add_product(
        self, y: GridTensor, x: GridTensor, weight: Any, factor: float, *, product: str, name: str
    ) -> GridTensor:
        """y + (x W^T) * factor, in one launch where the terms are few."""
        shape = x.shape[0], weight.rows
        if self._nodes is not None or not _is_update(weight, weight.columns, weight.rows):
            apart: GridTensor = super().add_product(y, x, weight, factor, product=product, name=name)
            return apart
        _check_update(y.shape, shape, x.shape[1], weight.columns, name)
        return self._update("forth", y, x, weight, float(factor), product, name)

    def add_product_backward(
        self, dx: GridTensor, dy: GridTensor, weight: Any, *, product: str, name: str
    ) -> GridTensor:
        """dx + dy W, in one launch where the terms are few."""
        shape = dy.shape[0], weight.columns
        if not _is_update(weight, weight.rows, weight.columns):
            apart: GridTensor = super().add_product_backward(dx, dy, weight, product=product, name=name)
            return apart
        _check_update(dx.shape, shape, dy.shape[1], weight.rows, name)
        return self._update("back", dx, dy, weight, 1.0, product, name)

    def _update(
        self, kernel: str, y: GridTensor, x: GridTensor, weight: Any, factor: float, product: str, name: str
    ) -> GridTensor:
        rows, columns = y.shape
        terms, out = x.shape[1], self._new(rows, columns)
        most = next(most for most in _UPDATES if terms <= most)
        flags = self._flags(product, rows), self._flags(name, rows)
        self._run(
            f"vox_update_{kernel}_{most}",
            (y.buffer, x.buffer, weight.buffer, out.buffer, *flags),
            constants(rows, terms, columns, factor),
            (-(-columns // _UPDATE_COLUMNS) * GROUP, -(-rows // _UPDATE_ROWS)),
        )
        return out

    def sum_run(self, leaves: Sequence[GridTensor], *, name: str) -> GridTensor:
        """The aligned tree over 2^n neighbours, in one launch where they lie in one buffer."""
        if not isinstance(leaves, GridExamples) or len(leaves) not in _TREES:
            apart: GridTensor = super().sum_run(leaves, name=name)
            return apart
        (rows, width), stride = leaves[0].shape, leaves.stride
        out = self._new(rows, width)
        nbytes = 4 * ((len(leaves) - 1) * stride + rows * width)
        neighbours = self._device.part(leaves.whole, 4 * stride * leaves.first, nbytes)
        self._run(
            f"vox_tree_{len(leaves)}",
            (neighbours, out.buffer, self._flags(name, rows)),
            constants(rows, width, stride),
            (rows * width, 1),
        )
        return out

    def sums_of_squares(self, tensors: Sequence[GridTensor], names: Sequence[str]) -> list[np.float32]:
        """`sum_of_squares` of each; those that lie in one buffer in two launches."""
        if not isinstance(tensors, GridParts):
            return super().sums_of_squares(tensors, names)
        places = np.array(
            [(first, math.prod(x.shape)) for x, first in zip(tensors, places_of(tensors), strict=True)]
        )
        chunks, count = -(-int(places[:, 1].max()) // BLOCK), len(tensors)
        table = self._ints(places)
        by_chunk, out = self._device.empty(4 * count * chunks), self._device.empty(4 * count)
        flags = self._watched.reserve_together([(name, _QUAD) for name in names])
        args = constants(chunks)
        self._run(
            "vox_many_squares",
            (tensors.whole.buffer, table, by_chunk),
            args,
            (-(-chunks // GROUP) * GROUP, count),
        )
        self._run("vox_many_folded", (by_chunk, table, out, flags), args, (count * GROUP, 1))
        return list(self._device.get(out, np.float32, (count,)))


def _is_update(weight: Any, terms: int, outputs: int) -> bool:
    return weight.format == "f32" and terms <= _UPDATES[-1] and outputs % _QUAD == 0


def _check_update(y: tuple[int, ...], product: tuple[int, int], terms: int, expected: int, name: str) -> None:
    if y != product or terms != expected:
        raise ValueError(f"{name}: y {list(y)} does not fit {list(product)} of {terms} and {expected} terms")
