"""Loss, gradients of parameters, adapters and update on the CPU lane.

`UpdateOps` is mixed into `CpuOps`, whose functions then include those of `UPDATE_OPERATORS`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_core.dropout_rate import DropoutRate
from mens_core.ops import Fault, Ints
from mens_core.training_ops import AdamW, DropoutKey
from mens_cpu_ref.arrays import Rows, address_of, new_rows
from mens_cpu_ref.float_weights import FLOAT_FORMATS, pack_floats
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.matrices import FloatMatrix
from mens_cpu_ref.quantised import QuantisedMatrix

__all__ = ["UpdateOps"]


class UpdateOps(CpuOps):
    """The second half of `TrainingOps`; the first is the backward of the forward's operators."""

    # --- memory ------------------------------------------------------------------------------

    def from_host(self, x: npt.NDArray[np.float32]) -> Rows:
        """Copy an array."""
        return Rows(np.array(x, np.float32, order="C"))

    def matrix(self, x: Rows, *, name: str) -> FloatMatrix:
        """Pack a float32 tensor [rows, columns] for `linear`."""
        if x.values.ndim != 2 or x.values.size == 0:
            raise ValueError(f"{name}: {list(x.values.shape)} is not a matrix")
        matrix, code = pack_floats(self._functions, FLOAT_FORMATS["f32"], x.values, x.values.shape)
        self._checked(code, x, name)
        return matrix

    # --- backward ------------------------------------------------------------------------------

    def linear_backward(self, dy: Rows, weight: FloatMatrix | QuantisedMatrix, *, name: str) -> Rows:
        """dy W, W dequantised piece by piece."""
        rows, outputs = dy.values.shape
        if outputs != weight.rows:
            raise ValueError(f"{name}: dy [{rows}, {outputs}] does not fit [{weight.rows}, {weight.columns}]")
        out = new_rows(rows, weight.columns)
        is_quantised = isinstance(weight, QuantisedMatrix)
        code = self._functions["quant_linear_backward" if is_quantised else "linear_backward"](
            weight.number, weight.address, outputs, weight.columns, dy.address, rows, out.address
        )
        return self._checked(code, out, name)

    def put_rows(self, x: Rows, rows: Ints, count: int) -> Rows:
        """Spread rows among zeros."""
        if len(rows) != len(x.values) or np.any(np.diff(rows, prepend=-1, append=count) <= 0):
            raise ValueError(
                f"{len(x.values)} rows can't go to {list(rows)} of {count}: one for each, ascending"
            )
        out = np.zeros((count, x.values.shape[1]), np.float32)
        out[rows] = x.values
        return Rows(out)

    def embed_backward(self, dy: Rows, token_ids: Ints, starts: Ints, rows: int, *, name: str) -> list[Rows]:
        """Sum dy's rows by token, example by example."""
        count, width = dy.values.shape
        _check_starts(starts, count, name)
        examples = len(starts) - 1
        # calloc: rows that no token took are never touched.
        out = Rows(np.zeros((examples, rows, width), np.float32))
        code = self._functions["embed_backward"](
            dy.address, self._index(token_ids), self._index(starts), examples, rows, width, out.address
        )
        return self._by_example(code, out, name)

    def example_products(self, a: Rows, b: Rows, starts: Ints, *, name: str) -> list[Rows]:
        """a^T b of each example's rows."""
        if len(a.values) != len(b.values):
            raise ValueError(f"{name}: {len(a.values)} rows and {len(b.values)} rows have no product")
        _check_starts(starts, len(a.values), name)
        examples, a_width, b_width = len(starts) - 1, a.values.shape[1], b.values.shape[1]
        out = Rows(np.empty((examples, a_width, b_width), np.float32))
        code = self._functions["example_products"](
            a.address, b.address, self._index(starts), examples, a_width, b_width, out.address
        )
        return self._by_example(code, out, name)

    # --- loss ----------------------------------------------------------------------------------

    def cross_entropy(self, logits: Rows, targets: Ints, *, name: str) -> tuple[Rows, Rows]:
        """Losses and gradients of each row."""
        rows, width = logits.values.shape
        if len(targets) != rows:
            raise ValueError(f"{name}: {rows} rows of logits and {len(targets)} targets")
        losses, gradients = Rows(np.empty(rows, np.float32)), new_rows(rows, width)
        code = self._functions["cross_entropy"](
            logits.address, self._index(targets), rows, width, losses.address, gradients.address
        )
        return self._checked(code, losses, name), gradients

    def example_sums(self, losses: Rows, positions: Ints, starts: Ints) -> Rows:
        """Sum each example's losses."""
        _check_starts(starts, len(losses.values), "example_sums")
        if len(positions) != len(losses.values):
            raise ValueError(f"example_sums: {len(losses.values)} losses at {len(positions)} positions")
        out = Rows(np.empty(len(starts) - 1, np.float32))
        code = self._functions["example_sums"](
            losses.address, self._index(positions), self._index(starts), len(starts) - 1, out.address
        )
        return self._checked(code, out, "example_sums")

    # --- adapters --------------------------------------------------------------------------------

    def scale(self, x: Rows, factor: float, *, name: str) -> Rows:
        """x * factor."""
        out = Rows(np.empty_like(x.values))
        code = self._functions["scale"](x.address, *_rows_of(x), factor, out.address)
        return self._checked(code, out, name)

    def add_scaled(self, y: Rows, x: Rows, factor: float, *, name: str) -> Rows:
        """y + x * factor."""
        if y.values.shape != x.values.shape:
            raise ValueError(f"{name}: {list(y.values.shape)} and {list(x.values.shape)} differ")
        out = Rows(np.empty_like(y.values))
        code = self._functions["add_scaled"](y.address, x.address, *_rows_of(y), factor, out.address)
        return self._checked(code, out, name)

    def dropout(
        self, x: Rows, rate: float, key: DropoutKey, positions: Ints, examples: Ints, *, name: str
    ) -> Rows:
        """Zero some elements and enlarge the others."""
        rows, width = x.values.shape
        if not len(positions) == len(examples) == rows:
            raise ValueError(f"{name}: {rows} rows, {len(positions)} positions, {len(examples)} examples")
        by = DropoutRate.of(rate)
        out = new_rows(rows, width)
        code = self._functions["dropout"](
            x.address,
            self._index(positions),
            self._index(examples),
            rows,
            width,
            key.seed,
            key.step,
            key.layer,
            by.threshold,
            by.factor,
            out.address,
        )
        return self._checked(code, out, name)

    # --- the update --------------------------------------------------------------------------------

    def sum_of_squares(self, x: Rows, *, name: str) -> np.float32:
        """C128 of x_i * x_i over the flat tensor."""
        out = Rows(np.empty(1, np.float32))
        code = self._functions["sum_of_squares"](x.address, x.values.size, out.address)
        total: np.float32 = self._checked(code, out, name).values[0]
        return total

    def adamw(self, parameter: Rows, gradient: Rows, m: Rows, v: Rows, by: AdamW, *, name: str) -> None:
        """Update parameter, m and v in place."""
        shapes = {x.values.shape for x in (parameter, gradient, m, v)}
        if len(shapes) != 1:
            raise ValueError(f"{name}: parameter, gradient and moments have the shapes {sorted(shapes)}")
        constants = np.array(by.in_order(), np.float32)
        code = self._functions["adamw"](
            parameter.address,
            gradient.address,
            m.address,
            v.address,
            *_rows_of(parameter),
            address_of(constants),
        )
        if code <= 0:
            self._checked(code, parameter, name)
            return
        # One fault for three results: a row is named once, whichever of them is not finite.
        rows = _rows_of(parameter)[0]
        parts = [np.isfinite(x.values).reshape(rows, -1).all(axis=1) for x in (parameter, m, v)]
        finite = np.logical_and.reduce(parts)
        self._faults.append(Fault(name, tuple(int(row) for row in np.flatnonzero(~finite))))

    def _by_example(self, code: int, out: Rows, name: str) -> list[Rows]:
        return [Rows(part) for part in self._checked(code, out, name).values]


def _rows_of(x: Rows) -> tuple[int, int]:
    """Rows and their width: what is not a matrix has its last axis as rows."""
    width = x.values.shape[-1]
    return x.values.size // width, width


def _check_starts(starts: Ints, rows: int, name: str) -> None:
    if len(starts) < 2 or starts[0] != 0 or starts[-1] != rows or np.any(np.diff(starts) < 0):
        raise ValueError(f"{name}: {list(starts)} does not divide {rows} rows into examples")
