"""An `Ops` that passes everything on and remembers what its weights and rotations were made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mens_core.conformance.inputs import Floats
from mens_core.conformance.passing import PassingOps
from mens_core.ops import Format, Ints, Matrix, RotaryTable, StoredTensor, Tensor

__all__ = ["HeldMatrix", "HeldRotary", "RememberingOps"]


@dataclass(frozen=True, slots=True)
class HeldMatrix:
    """A lane's weight, and how it was stored."""

    inner: Matrix
    format: Format
    columns: int


@dataclass(frozen=True, slots=True)
class HeldRotary:
    """A lane's table, and what it was asked for."""

    inner: RotaryTable
    frequencies: tuple[int, ...]
    factor: tuple[int, int] | None


class RememberingOps(PassingOps):
    """The base of lanes that compute with a weight's or a rotation's numbers themselves."""

    def load_matrix(self, stored: StoredTensor) -> HeldMatrix:
        return HeldMatrix(self.lane.load_matrix(stored), stored.format, stored.shape[1])

    def embed(self, table: HeldMatrix, token_ids: Ints, scale: float | None, *, name: str) -> Tensor:
        return self.lane.embed(table.inner, token_ids, scale, name=name)

    def linear(self, x: Tensor, weight: HeldMatrix, *, name: str) -> Tensor:
        return self.lane.linear(x, weight.inner, name=name)

    def dense(self, weight: HeldMatrix) -> Floats:
        """Return the weight's transpose, out of the lane itself: float32 [columns, rows]."""
        eye = self.tensor(np.eye(weight.columns, dtype=np.float32))
        return self.values(self.lane.linear(eye, weight.inner, name="dense"))

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> HeldRotary:
        inner = self.lane.rotary_table(frequencies, attention_factor)
        return HeldRotary(inner, tuple(frequencies), attention_factor)

    def rope(self, x: Tensor, heads: int, table: HeldRotary, positions: Ints, *, name: str) -> Tensor:
        return self.lane.rope(x, heads, table.inner, positions, name=name)
