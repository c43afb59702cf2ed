"""Linear layers of one input as one product, with the low-rank updates that lie on them, forward and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn import functional

from mens_core.models.linear import Linear
from mens_torch_cuda.fast.weights import FastMatrix, join

__all__ = ["Drop", "Group", "Part", "Update"]

Drop = Callable[[torch.Tensor, int], torch.Tensor]
"""Dropout on the input of the update of a number; the same values each time it is asked."""


@dataclass(slots=True, eq=False)
class Update:
    """The updates of a group's layers: u = A x, then B u on each layer's own rows.

    R is the sum of the layers' ranks.
    """

    a: torch.Tensor
    """[R, columns] in bfloat16."""
    b: torch.Tensor
    """[rows, R] in bfloat16, scaled; a layer has numbers in its own rows and columns only."""
    a_gradient: torch.Tensor
    """[R, columns] in float32, summed over micro-batches."""
    parts: list[Part]


@dataclass(slots=True, eq=False)
class Part:
    """One layer's share of a group's update."""

    rows: slice
    """Of b."""
    columns: slice
    """Of b, and rows of a."""
    gradient: torch.Tensor
    """Of its B: [its rows, its rank] in float32."""
    scale: float
    number: int
    """Of the matrix in the adapter."""


@dataclass(slots=True, eq=False)
class Group:
    """Layers that read one input."""

    names: tuple[str, ...]
    rows: tuple[int, ...]
    weight: torch.Tensor
    """[all rows, columns]"""
    update: Update | None = None
    drop: Drop | None = field(default=None, repr=False)

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> Group:
        """Join the layers' weights, which stay views of the same memory."""
        matrices: list[FastMatrix] = [linear.weight for linear in linears]
        whole = matrices[0].data if len(matrices) == 1 else join(matrices)
        return cls(tuple(linear.name for linear in linears), tuple(m.rows for m in matrices), whole)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[N, columns] to [N, all rows], and u [N, R]."""
        y = functional.linear(x, self.weight)
        if self.update is None:
            return y, None
        u = self.reduced(x)
        return y.addmm_(u, self.update.b.t()), u

    def backward(
        self, dy: torch.Tensor, x: torch.Tensor, u: torch.Tensor | None, *, wants_input: bool = True
    ) -> torch.Tensor | None:
        """Gradient of x; those of the update are added to its sums."""
        dx = dy @ self.weight if wants_input else None
        update = self.update
        if update is None or u is None:
            return dx
        du = dy @ update.b
        whole = dy.t() @ u
        for part in update.parts:
            part.gradient.add_(whole[part.rows, part.columns], alpha=part.scale)
        if self.drop is None:
            update.a_gradient.add_(du.t() @ x)
            return None if dx is None else dx.addmm_(du, update.a)
        for part in update.parts:
            at = part.columns
            update.a_gradient[at].add_(du[:, at].t() @ self.drop(x, part.number))
            if dx is not None:
                dx += self.drop(du[:, at] @ update.a[at], part.number)
        return dx

    def reduced(self, x: torch.Tensor) -> torch.Tensor:
        """[N, columns] to u [N, R]."""
        if self.update is None:
            raise AssertionError("a group without update has no u")
        if self.drop is None:
            return functional.linear(x, self.update.a)
        a, drop = self.update.a, self.drop
        return torch.cat(
            [functional.linear(drop(x, part.number), a[part.columns]) for part in self.update.parts], 1
        )
