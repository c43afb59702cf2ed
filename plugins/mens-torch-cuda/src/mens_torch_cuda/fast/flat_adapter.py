"""An adapter's numbers in flat buffers: one operation on all of them, and views of each by its key."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from mens_core.adapters.plan import AdaptedMatrix, AdapterPlan
from mens_core.trainer import TrainerState
from mens_core.training_ops import AdamW
from mens_torch_cuda.fast.decoder import Decoder
from mens_torch_cuda.fast.embedding import Table, TableUpdate
from mens_torch_cuda.fast.groups import Group, Part, Update

__all__ = ["FlatAdapter"]

Floats = npt.NDArray[np.float32]


class FlatAdapter:
    """Values, moments and gradients in float32; what products read is their rounding to bfloat16."""

    def __init__(
        self, plan: AdapterPlan, decoder: Decoder, device: torch.device, state: TrainerState
    ) -> None:
        """Put the updates on the decoder's groups and table, which read them from now on."""
        self._shapes = plan.shapes
        self._places: dict[str, int] = {}
        self._turned: str | None = None
        """The key of an embedding's A, which lies here as [tokens, rank]."""
        by_name = {matrix.name: matrix for matrix in plan.matrices}
        chosen: list[tuple[Group, list[AdaptedMatrix]]] = []
        count = 0
        for group in decoder.groups:
            matrices = [by_name.pop(name) for name in group.names if name in by_name]
            if matrices:
                chosen.append((group, matrices))
                count = self._place(matrices, count)
        table = by_name.pop(decoder.embedding.name, None)
        if table is not None:
            self._turned = table.keys[0]
            count = self._place([table], count)
        if by_name:
            raise AssertionError(f"no group holds {', '.join(by_name)}")
        self.values = self._taken(state.parameters, count).to(device)
        self.first = self._taken(state.first_moments, count).to(device)
        self.second = self._taken(state.second_moments, count).to(device)
        self.gradient = torch.zeros_like(self.values)
        self._half = torch.empty_like(self.values, dtype=torch.bfloat16)
        self._groups = [(matrices, self._update(group, matrices)) for group, matrices in chosen]
        self._table = None if table is None else (table, self._table_update(decoder.embedding, table))
        # Pinned: a copy to memory that isn't takes as long as hashing it.
        self._host = torch.empty(count, pin_memory=device.type == "cuda")
        self.install(self.values, self.first, self.second)

    def _place(self, matrices: list[AdaptedMatrix], at: int) -> int:
        """Give them places from `at` on; return their end.

        Parts of one kind lie side by side: the As of a group are one matrix.
        """
        for keys in zip(*(matrix.keys for matrix in matrices), strict=True):
            for key in keys:
                self._places[key] = at
                at += math.prod(self._shapes[key])
        return at

    def _taken(self, tensors: Mapping[str, Floats], count: int) -> torch.Tensor:
        flat = torch.empty(count)
        for key in self._places:
            values = np.array(tensors[key], np.float32)
            self._view(flat, key).copy_(torch.from_numpy(values.T if key == self._turned else values))
        return flat

    def _update(self, group: Group, matrices: list[AdaptedMatrix]) -> Update:
        columns, ranks = matrices[0].columns, sum(matrix.rank for matrix in matrices)
        begin = self._places[matrices[0].keys[0]]
        area = slice(begin, begin + ranks * columns)
        parts, at = [], 0
        for matrix in matrices:
            first = sum(group.rows[: group.names.index(matrix.name)])
            parts.append(
                Part(
                    rows=slice(first, first + matrix.rows),
                    columns=slice(at, at + matrix.rank),
                    gradient=self._view(self.gradient, matrix.keys[1]),
                    scale=matrix.scale,
                    number=matrix.number,
                )
            )
            at += matrix.rank
        group.update = Update(
            a=self._half[area].view(ranks, columns),
            b=torch.zeros((sum(group.rows), ranks), dtype=torch.bfloat16, device=self.values.device),
            a_gradient=self.gradient[area].view(ranks, columns),
            parts=parts,
        )
        return group.update

    def _table_update(self, table: Table, matrix: AdaptedMatrix) -> TableUpdate:
        key_a, key_b = matrix.keys
        table.update = TableUpdate(
            a=self._view(self._half, key_a),
            b=torch.zeros((matrix.rows, matrix.rank), dtype=torch.bfloat16, device=self.values.device),
            a_gradient=self._view(self.gradient, key_a),
            b_gradient=self._view(self.gradient, key_b),
            scale=matrix.scale,
        )
        return table.update

    def install(self, values: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Run with these numbers from now on."""
        self.values, self.first, self.second = values, first, second
        self._half.copy_(values)
        scales = {part.scale for _, update in self._groups for part in update.parts}
        scaled = {scale: (values * scale).to(torch.bfloat16) for scale in scales}
        for matrices, update in self._groups:
            for matrix, part in zip(matrices, update.parts, strict=True):
                update.b[part.rows, part.columns] = self._view(scaled[part.scale], matrix.keys[1])
        if self._table is not None:
            matrix, of_table = self._table
            of_table.b.copy_(self._view(values, matrix.keys[1]) * of_table.scale)

    def on_host(self, flat: torch.Tensor) -> dict[str, Floats]:
        """The numbers of a flat tensor by their keys, in memory that the next call writes to."""
        host = self._host.copy_(flat)
        views = {key: self._view(host, key).numpy() for key in self._places}
        return {key: view.T if key == self._turned else view for key, view in views.items()}

    def stepped(self, gradient: torch.Tensor, by: AdamW) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Values and moments after AdamW; what is here stays as it is."""
        first = self.first * by.beta1 + gradient * by.one_minus_beta1
        second = self.second * by.beta2 + gradient.square() * by.one_minus_beta2
        away = (second / by.correction2).sqrt_().add_(by.eps)
        values = self.values * by.decay - (first / by.correction1).div_(away).mul_(by.learning_rate)
        return values, first, second

    def _view(self, flat: torch.Tensor, key: str) -> torch.Tensor:
        rows, columns = self._shapes[key]
        if key == self._turned:
            rows, columns = columns, rows
        return flat[self._places[key] :][: rows * columns].view(rows, columns)
