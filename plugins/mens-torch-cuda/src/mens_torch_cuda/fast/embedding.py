"""The token embedding with its low-rank update: rows of A looked up, B behind them; forward and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Table", "TableUpdate"]


@dataclass(slots=True, eq=False)
class TableUpdate:
    """The update of a table."""

    a: torch.Tensor
    """[tokens, rank] in bfloat16: turned, since its rows are looked up."""
    b: torch.Tensor
    """[width, rank] in bfloat16, scaled."""
    a_gradient: torch.Tensor
    """[tokens, rank] in float32."""
    b_gradient: torch.Tensor
    """[width, rank] in float32."""
    scale: float


@dataclass(slots=True, eq=False)
class Table:
    """A row for each token."""

    name: str
    weight: torch.Tensor
    """[tokens, width] in bfloat16."""
    scale: float | None
    """Multiplies row and update; None: 1."""
    update: TableUpdate | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[N] to [N, width]."""
        x = self.weight[token_ids]
        if self.update is not None:
            x = x.addmm_(self.update.a[token_ids], self.update.b.t())
        return x if self.scale is None else (x.float() * self.scale).to(x.dtype)

    def backward(self, dy: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Add the gradients of the update to its sums; dy: [N, width]."""
        update = self.update
        if update is None:
            return
        if self.scale is not None:
            dy = (dy.float() * self.scale).to(dy.dtype)
        du = dy @ update.b
        update.a_gradient.index_add_(0, token_ids, du.float())
        update.b_gradient.add_(dy.t() @ update.a[token_ids], alpha=update.scale)
