"""Loss, gradients of parameters, adapters and update over the grid kernels: docs/numerics.md, section 13.

One half of `GridTrainingOps`; `grid_backward_ops` is the other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mens_core.dropout_rate import DropoutRate
from mens_core.grid_device import Buffer, constants
from mens_core.grid_launches import alike
from mens_core.grid_ops import TALL, GridOps
from mens_core.grid_tensors import GridTensor
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import Ints
from mens_core.training_ops import AdamW, DropoutKey

__all__ = ["GridUpdateOps"]

_CHUNK = 128
_ALIGNED = 4
"""Floats: a part of a buffer starts at a multiple of 16 bytes."""
_STREAM_DROPOUT = 4


class GridUpdateOps(GridOps):
    """What a step does beside the backward of the forward's operators."""

    # --- memory ------------------------------------------------------------------------------

    def from_host(self, x: npt.NDArray[np.float32]) -> GridTensor:
        """Copy an array there."""
        values = np.ascontiguousarray(x, np.float32)
        return GridTensor(self._device.put(values), values.shape)

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
            elements = part.shape[0] * width
            self._run("vox_join", (part.buffer, out.buffer), constants(elements, first), (elements, 1))
            first += elements
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
        (rows, p), (others, q) = a.shape, b.shape
        if rows != others:
            raise ValueError(f"{name}: {rows} rows and {others} rows have no product")
        _check_starts(starts, rows, name)
        # The longer side lies along the threads; a product knows no left and right.
        is_wide_first = p > q
        tall, wide = (b, a) if is_wide_first else (a, b)
        examples, tiles, stride = len(starts) - 1, -(-min(p, q) // TALL), _aligned(p * q)
        out = self._device.empty(4 * stride * examples)
        self._run(
            "vox_example_products",
            (tall.buffer, wide.buffer, self._ints(starts), out, self._flags(name, examples)),
            constants(min(p, q), max(p, q), tiles, int(is_wide_first), stride),
            (max(p, q), examples * tiles),
        )
        return self._by_example(out, stride, examples, (p, q))

    # --- the update --------------------------------------------------------------------------------

    def sum_of_squares(self, x: GridTensor, *, name: str) -> np.float32:
        """C128 of x_i * x_i over the flat tensor."""
        elements = int(np.prod(x.shape))
        by_chunk = self._chunks("vox_chunk_squares", x.buffer, 1, elements)
        out = self._device.empty(4)
        self._run(
            "vox_chunks_folded",
            (by_chunk, out, self._flags(name, 1)),
            constants(-(-elements // _CHUNK)),
            (GROUP, 1),
        )
        return np.float32(self._device.get(out, np.float32, (1,))[0])

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
        return [
            GridTensor(self._device.part(out, 4 * stride * example, nbytes), shape)
            for example in range(examples)
        ]


def _aligned(elements: int) -> int:
    return -(-elements // _ALIGNED) * _ALIGNED


def _word(value: int) -> int:
    """The low 32 bits, as a field of int32 holds them."""
    low = value & 0xFFFFFFFF
    return low - (1 << 32) if low >> 31 else low


def _check_starts(starts: Ints, rows: int, name: str) -> None:
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != rows or np.any(np.diff(starts) < 0):
        raise ValueError(f"{name}: {np.asarray(starts).tolist()} does not divide {rows} rows into examples")
