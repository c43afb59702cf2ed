"""Loss, gradients of parameters, adapters and update over the grid kernels: docs/numerics.md, section 13.

One half of `GridTrainingOps`; `grid_backward_ops` is the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from mens_core.dropout_rate import DropoutRate
from mens_core.grid_device import Buffer, constants
from mens_core.grid_launches import alike
from mens_core.grid_ops import TALL, GridOps
from mens_core.grid_tensors import GridExamples, GridParts, GridTensor
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import Ints
from mens_core.training_ops import AdamW, DropoutKey, TrainingOps

__all__ = ["GridUpdateOps", "places_of"]

_CHUNK = 128
_ALIGNED = 4
"""Floats: a part of a buffer starts at a multiple of 16 bytes."""
_STREAM_DROPOUT = 4


class GridUpdateOps(GridOps, TrainingOps):
    """What a step does beside the backward of the forward's operators."""

    # --- memory ------------------------------------------------------------------------------

    def from_host(self, x: npt.NDArray[np.float32]) -> GridTensor:
        """Copy an array there."""
        values = np.ascontiguousarray(x, np.float32)
        return GridTensor(self._device.put(values), values.shape)

    def copy(self, x: GridTensor) -> GridTensor:
        """x in memory of its own; bits move."""
        out = self._new(*x.shape)
        self._join(x, out.buffer, 0)
        return out

    def all_to_host(self, tensors: Sequence[GridTensor]) -> list[npt.NDArray[np.float32]]:
        """`to_host` of each; all are read at once."""
        parts = tensors if isinstance(tensors, GridParts) else self._gathered(list(tensors))
        values = self.to_host(parts.whole).reshape(-1)
        return [
            values[first : first + math.prod(x.shape)].reshape(x.shape)
            for x, first in zip(parts, places_of(parts), strict=True)
        ]

    def copies(self, tensors: Sequence[GridTensor]) -> list[GridTensor]:
        """`copy` of each, one behind the other."""
        if not isinstance(tensors, GridParts):
            return self._gathered(list(tensors))
        return self._parts_of(self.copy(tensors.whole), tensors)

    def matrices(self, tensors: Sequence[GridTensor], names: Sequence[str]) -> list[GridMatrix]:
        """`matrix` of each."""
        if not isinstance(tensors, GridParts):
            return super().matrices(tensors, names)
        flushed = self._parts_of(self._scaled(tensors, 1.0, names), tensors)
        return [GridMatrix("f32", x.shape[0], x.shape[1], 0, x.buffer) for x in flushed]

    def scale_all(self, tensors: list[GridTensor], factor: float, names: Sequence[str]) -> list[GridTensor]:
        """`scale` of each; tensors that were apart lie one behind the other afterwards."""
        parts = tensors if isinstance(tensors, GridParts) else self._gathered(tensors)
        return self._parts_of(self._scaled(parts, factor, names), parts)

    def adamw_all(
        self,
        parameters: list[GridTensor],
        gradients: list[GridTensor],
        m: list[GridTensor],
        v: list[GridTensor],
        by: AdamW,
        names: Sequence[str],
    ) -> None:
        """`adamw` of each; between tensors an eps of 0 would make NaN of the zeros there."""
        if by.eps == 0 or not all(isinstance(of, GridParts) for of in (parameters, gradients, m, v)):
            super().adamw_all(parameters, gradients, m, v, by, names)
            return
        wholes = [of.whole for of in (parameters, gradients, m, v) if isinstance(of, GridParts)]
        rows, width = alike("adamw", **{f"argument {i + 1}": whole for i, whole in enumerate(wholes)})
        flags = self._watched.reserve_together(_flagged(parameters, names))
        args = constants(rows, width, *map(float, by.in_order()))
        self._run("vox_adamw", (*(whole.buffer for whole in wholes), flags), args, (rows * width, 1))

    def _scaled(self, parts: GridParts, factor: float, names: Sequence[str]) -> GridTensor:
        rows, width = parts.whole.shape
        out, flags = self._new(rows, width), self._watched.reserve_together(_flagged(parts, names))
        args = constants(rows, width, float(factor))
        self._run("vox_scale", (parts.whole.buffer, out.buffer, flags), args, (rows * width, 1))
        return out

    def _gathered(self, tensors: list[GridTensor]) -> GridParts:
        """Copies one behind the other; the list is emptied on the way."""
        shapes = [x.shape for x in tensors]
        total = sum(_room(shape) for shape in shapes)
        whole, at = GridTensor(self._device.zeros(4 * total), (total // _ALIGNED, _ALIGNED)), 0
        for shape in shapes:
            self._join(tensors.pop(0), whole.buffer, at)
            at += _room(shape)
        return self._parts_of(whole, [GridTensor(None, shape) for shape in shapes])

    def _parts_of(self, whole: GridTensor, like: Sequence[GridTensor]) -> GridParts:
        """The parts of a buffer that lie as those of another one."""
        parts, at = [], 0
        for x in like:
            nbytes = 4 * math.prod(x.shape)
            parts.append(GridTensor(self._device.part(whole.buffer, 4 * at, nbytes), x.shape))
            at += _room(x.shape)
        return GridParts(parts, whole)

    def _join(self, x: GridTensor, out: Buffer, first: int) -> None:
        elements = math.prod(x.shape)
        self._run("vox_join", (x.buffer, out), constants(elements, first), (elements, 1))

    def matrix(self, x: GridTensor, *, name: str) -> GridMatrix:
        """Copy a float32 tensor [rows, columns] as a weight for `linear`."""
        if len(x.shape) != 2 or 0 in x.shape:
            raise ValueError(f"{name}: {list(x.shape)} is not a matrix")
        # Subnormals are flushed here; every reader of a weight would do so.
        copy = self.scale(x, 1.0, name=name)
        return GridMatrix("f32", *x.shape, 0, copy.buffer)

    def put_rows(self, x: GridTensor, rows: Ints, count: int) -> GridTensor:
        """Spread rows among zeros."""
        if len(rows) != x.shape[0] or np.any(np.diff(rows, prepend=-1, append=count) <= 0):
            places = np.asarray(rows).tolist()
            raise ValueError(f"{x.shape[0]} rows can't go to {places} of {count}: one for each, ascending")
        width = x.shape[1]
        sources = np.full(count, -1, np.int32)
        sources[rows] = np.arange(len(rows))
        out = self._new(count, width)
        self._run(
            "vox_put_rows", (x.buffer, self._ints(sources), out.buffer), constants(width), (width, count)
        )
        return out

    def join_rows(self, parts: Sequence[GridTensor]) -> GridTensor:
        """One below the other."""
        width = parts[0].shape[1]
        if any(part.shape[1] != width for part in parts):
            raise ValueError(f"rows of the widths {[part.shape[1] for part in parts]} can't be joined")
        out, first = self._new(sum(part.shape[0] for part in parts), width), 0
        for part in parts:
            self._join(part, out.buffer, first)
            first += part.shape[0] * width
        return out

    # --- loss ----------------------------------------------------------------------------------

    def cross_entropy(self, logits: GridTensor, targets: Ints, *, name: str) -> tuple[GridTensor, GridTensor]:
        """Losses and gradients of each row."""
        rows, width = logits.shape
        if len(targets) != rows:
            raise ValueError(f"{name}: {rows} rows of logits and {len(targets)} targets")
        self._check_ids(width, targets, name)
        places, chunks = self._ints(targets), -(-width // _CHUNK)
        most, sums = self._device.empty(4 * rows), self._device.empty(4 * rows)
        gradients, losses = self._new(rows, width), self._new(rows)
        self._run("vox_row_max", (logits.buffer, most), constants(width), (rows * GROUP, 1))
        self._run("vox_numerators", (logits.buffer, most, gradients.buffer), constants(width), (width, rows))
        by_chunk = self._chunks("vox_chunk_sums", gradients.buffer, rows, width)
        self._run(
            "vox_loss",
            (logits.buffer, most, by_chunk, places, sums, losses.buffer, self._flags(name, rows)),
            constants(width, chunks),
            (rows * GROUP, 1),
        )
        self._run("vox_loss_gradient", (gradients.buffer, sums, places), constants(width), (width, rows))
        return losses, gradients

    def example_sums(self, losses: GridTensor, positions: Ints, starts: Ints) -> GridTensor:
        """Sum each example's losses."""
        (count,) = losses.shape
        _check_starts(starts, count, "example_sums")
        if len(positions) != count:
            raise ValueError(f"example_sums: {count} losses at {len(positions)} positions")
        numbers = np.arange(max(count, len(starts)), dtype=np.int32)
        examples, out = numbers[: len(starts) - 1], self._new(len(starts) - 1)
        self._sums_by_position(
            losses.buffer,
            (numbers[:count], positions, starts, np.zeros_like(examples), examples),
            constants(1, 1),
            1,
            out.buffer,
            self._flags("example_sums", len(examples)),
        )
        return out

    # --- adapters --------------------------------------------------------------------------------

    def scale(self, x: GridTensor, factor: float, *, name: str) -> GridTensor:
        """x * factor."""
        return self._elementwise("vox_scale", (x,), float(factor), name)

    def dropout(
        self, x: GridTensor, rate: float, key: DropoutKey, positions: Ints, examples: Ints, *, name: str
    ) -> GridTensor:
        """Zero some elements and enlarge the others."""
        rows, width = x.shape
        if not len(positions) == len(examples) == rows:
            raise ValueError(f"{name}: {rows} rows, {len(positions)} positions, {len(examples)} examples")
        if width > 1 << 18:
            raise ValueError(f"{name}: {width} columns; dropout counts up to {1 << 18}")
        for what, numbers, most in (("position", positions, 1 << 31), ("example", examples, 1 << 16)):
            if rows and not 0 <= int(numbers.min()) <= int(numbers.max()) < most:
                raise ValueError(f"{name}: a row's {what} is not in [0, {most})")
        by = DropoutRate.of(rate)
        words = (key.seed, key.seed >> 32, _STREAM_DROPOUT + (key.layer << 16), key.step, by.threshold)
        return self._rows(
            "vox_dropout",
            (x.buffer, self._ints(positions), self._ints(examples)),
            x.shape,
            constants(width, *(_word(word) for word in words), float(by.factor)),
            name,
            across=-(-width // 4),
        )

    def embed_backward(
        self, dy: GridTensor, token_ids: Ints, starts: Ints, rows: int, *, name: str
    ) -> list[GridTensor]:
        """Sum dy's rows by token, example by example."""
        count, width = dy.shape
        _check_starts(starts, count, name)
        if len(token_ids) != count:
            raise ValueError(f"{name}: {count} rows and {len(token_ids)} tokens")
        self._check_ids(rows, token_ids, name)
        examples = len(starts) - 1
        example_of = np.repeat(np.arange(examples), np.diff(starts))
        # Each token's rows in each example, ascending: one sum.
        order = np.lexsort((np.arange(count), token_ids, example_of))
        keys = np.stack([example_of[order], token_ids[order]])
        begins = np.flatnonzero(np.any(np.diff(keys, prepend=-1), axis=0))
        stride = _aligned(rows * width)
        out = self._device.zeros(4 * stride * examples)
        self._sums_by_position(
            dy.buffer,
            (
                order,
                order - np.asarray(starts)[example_of[order]],
                np.append(begins, count),
                keys[1][begins],
                keys[0][begins],
            ),
            constants(width, stride),
            width,
            out,
            self._flags(name, examples),
        )
        return self._by_example(out, stride, examples, (rows, width))

    def example_products(self, a: GridTensor, b: GridTensor, starts: Ints, *, name: str) -> list[GridTensor]:
        """a^T b of each example's rows."""
        return self._example_products("vox_example_products", TALL, a, b, starts, name)

    def _example_products(
        self,
        kernel: str,
        tall_ones: int,
        a: GridTensor,
        b: GridTensor,
        starts: Ints,
        name: str,
        *,
        columns: int = GROUP,
    ) -> list[GridTensor]:
        """By a kernel whose groups have so many tall ones and columns."""
        (rows, p), (others, q) = a.shape, b.shape
        if rows != others:
            raise ValueError(f"{name}: {rows} rows and {others} rows have no product")
        _check_starts(starts, rows, name)
        # The longer side lies along the threads; a product knows no left and right.
        is_wide_first = p > q
        tall, wide = (b, a) if is_wide_first else (a, b)
        examples, tiles, stride = len(starts) - 1, -(-min(p, q) // tall_ones), _aligned(p * q)
        out = self._device.empty(4 * stride * examples)
        self._run(
            kernel,
            (tall.buffer, wide.buffer, self._ints(starts), out, self._flags(name, examples)),
            constants(min(p, q), max(p, q), tiles, int(is_wide_first), stride),
            (-(-max(p, q) // columns) * GROUP, examples * tiles),
        )
        return self._by_example(out, stride, examples, (p, q))

    # --- the update --------------------------------------------------------------------------------

    def sum_of_squares(self, x: GridTensor, *, name: str) -> np.float32:
        """C128 of x_i * x_i over the flat tensor."""
        return self.sums_of_squares([x], [name])[0]

    def sums_of_squares(self, tensors: Sequence[GridTensor], names: Sequence[str]) -> list[np.float32]:
        """`sum_of_squares` of each; all are read at once."""
        out = self._device.empty(4 * _ALIGNED * len(tensors))
        for i, (x, name) in enumerate(zip(tensors, names, strict=True)):
            elements = int(np.prod(x.shape))
            by_chunk = self._chunks("vox_chunk_squares", x.buffer, 1, elements)
            self._run(
                "vox_chunks_folded",
                (by_chunk, self._device.part(out, 4 * _ALIGNED * i, 4), self._flags(name, 1)),
                constants(-(-elements // _CHUNK)),
                (GROUP, 1),
            )
        found = self._device.get(out, np.float32, (len(tensors), _ALIGNED))
        return [np.float32(value) for value in found[:, 0]]

    def adamw(
        self,
        parameter: GridTensor,
        gradient: GridTensor,
        m: GridTensor,
        v: GridTensor,
        by: AdamW,
        *,
        name: str,
    ) -> None:
        """Update parameter, m and v in place."""
        shape = alike(name, parameter=parameter, gradient=gradient, m=m, v=v)
        rows, width = int(np.prod(shape[:-1])), shape[-1]
        self._run(
            "vox_adamw",
            (parameter.buffer, gradient.buffer, m.buffer, v.buffer, self._flags(name, rows)),
            constants(rows, width, *map(float, by.in_order())),
            (rows * width, 1),
        )

    # --- launches ------------------------------------------------------------------------------------

    def _chunks(self, kernel: str, x: Buffer, rows: int, width: int) -> Buffer:
        """Sums of the chunks of each row: [rows, chunks]."""
        chunks = -(-width // _CHUNK)
        out = self._device.empty(4 * rows * chunks)
        self._run(kernel, (x, out), constants(width, chunks), (-(-chunks // GROUP) * GROUP, rows))
        return out

    def _sums_by_position(
        self,
        x: Buffer,
        indices: tuple[npt.NDArray[np.integer], ...],
        args: bytes,
        width: int,
        out: Buffer,
        flags: Buffer,
    ) -> None:
        sums = len(indices[-1])
        self._run(
            "vox_sums_by_position",
            (x, *(self._ints(index) for index in indices), out, flags),
            args,
            (width, sums),
        )

    def _by_example(
        self, out: Buffer, stride: int, examples: int, shape: tuple[int, int]
    ) -> list[GridTensor]:
        nbytes = 4 * shape[0] * shape[1]
        parts = [
            GridTensor(self._device.part(out, 4 * stride * example, nbytes), shape)
            for example in range(examples)
        ]
        return GridExamples(parts, out, stride)


def _room(shape: tuple[int, ...]) -> int:
    """Floats that a part takes: flags of four floats each, in fours."""
    return -(-math.prod(shape) // (_ALIGNED * _ALIGNED)) * _ALIGNED * _ALIGNED


def places_of(parts: Sequence[GridTensor]) -> list[int]:
    """First float of each part."""
    return list(accumulate((_room(x.shape) for x in parts), initial=0))[:-1]


def _flagged(parts: Sequence[GridTensor], names: Sequence[str]) -> list[tuple[str, int]]:
    """Flags of each part: one for four floats."""
    return [(name, _room(x.shape) // _ALIGNED) for x, name in zip(parts, names, strict=True)]


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


def _word(value: int) -> int:
    """The low 32 bits, as a field of int32 holds them."""
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def _check_starts(starts: Ints, rows: int, name: str) -> None:
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != rows or np.any(np.diff(starts) < 0):
        raise ValueError(f"{name}: {np.asarray(starts).tolist()} does not divide {rows} rows into examples")
