"""The operators of fast mode, in torch: bfloat16 products, float32 between them, logits in float32.

A value's last bits depend on what else is in the step and on the library's choice of kernel; nothing here
promises bits. Non-finite values are looked for twice a step, behind the layers and in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from mens_core.ops import AttentionSpec, Batch, Fault, Ints, ServedStep, StoredTensor, rows_of_batch
from mens_core.training_ops import AdapterOps
from mens_torch_cuda.fast import elementwise, fused
from mens_torch_cuda.fast.attention import (
    Bounds,
    FastKvCache,
    Places,
    decode_attention,
    prefill_attention,
)
from mens_torch_cuda.fast.recorded import Recorder
from mens_torch_cuda.fast.rotary import FastRotaryTable
from mens_torch_cuda.fast.weights import FastMatrix, join, load_matrix, load_vector

__all__ = ["FastOps"]

_WIDENED = 1 << 14
"""Rows of the output matrix that are widened at once where products can't have float32 results."""


@dataclass(frozen=True, slots=True, eq=False)
class Normed:
    """What `head_norm` returns: a norm that is still to be made."""

    x: torch.Tensor
    """[N, heads * C]"""
    weight: torch.Tensor
    eps: float

    def made(self) -> torch.Tensor:
        """Its values, rounded, [N, heads * C]."""
        by_head = self.x.reshape(-1, len(self.weight))
        return elementwise.norm(by_head, self.weight, self.eps).view(self.x.shape)


class FastOps(AdapterOps):
    """One model's operators on a torch device."""

    def __init__(self, device: torch.device, *, facts: Mapping[str, Any]) -> None:
        self.device = device
        self._facts = facts
        self._joined: dict[tuple[int, ...], tuple[torch.Tensor, tuple[FastMatrix, ...]]] = {}
        self._tables: list[FastRotaryTable] = []
        self._places: Places | None = None
        self._appended: tuple[int, torch.Tensor, torch.Tensor] | None = None
        self._faults: list[Fault] = []
        self._chosen: tuple[torch.Tensor, Ints] | None = None
        """Logits of the last step and the highest token of each row."""
        self._recorder = Recorder(device) if device.type == "cuda" else None
        self._recorded_with: list[int] = []
        """Sizes of the tables that recordings read."""

    def facts(self) -> dict[str, Any]:
        return dict(self._facts)

    # --- memory --------------------------------------------------------------------------------

    def load_matrix(self, stored: StoredTensor) -> FastMatrix:
        return load_matrix(self.device, stored)

    def load_vector(self, stored: StoredTensor, *, plus_one: bool = False) -> torch.Tensor:
        return load_vector(self.device, stored, plus_one=plus_one)

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> FastKvCache:
        """In bfloat16: half of what the canonical lane's takes."""
        return FastKvCache.reserve(
            self.device, layers=layers, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks
        )

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> FastRotaryTable:
        table = FastRotaryTable(self.device, frequencies, attention_factor)
        self._tables.append(table)
        return table

    def to_host(self, x: torch.Tensor | Normed) -> npt.NDArray[np.float32]:
        if isinstance(x, Normed):
            x = x.made()
        return x.detach().float().cpu().numpy()

    def from_host(self, x: npt.NDArray[np.float32]) -> torch.Tensor:
        return torch.from_numpy(np.array(x, np.float32)).to(self.device)

    def matrix(self, x: torch.Tensor, *, name: str) -> FastMatrix:
        return FastMatrix(x.to(torch.bfloat16, copy=True))

    def take_faults(self) -> list[Fault]:
        found, self._faults = self._faults, []
        return found

    # --- a step --------------------------------------------------------------------------------

    def run_step(
        self, step: ServedStep, batch: Batch, cache: FastKvCache
    ) -> tuple[torch.Tensor | None, list[Fault]]:
        """A whole step; decode steps of a shape that came before are replayed as one CUDA graph."""
        self._chosen, self._faults = None, []
        for table in self._tables:
            table.reach(int(batch.positions.max()))
        with torch.inference_mode():
            if self._recorder is None or not self._recorder.takes(batch):
                logits, flags = self._run(step, Places.of(batch, self.device), cache)
            else:
                # Whoever moved them: a prompt, a trace, a training step.
                sizes = [table.size for table in self._tables]
                if sizes != self._recorded_with:
                    self._recorder.forget()
                    self._recorded_with = sizes
                logits, flags = self._recorder.run(self._run, step, batch, cache)
        read = flags.cpu().numpy()
        rows = len(batch.positions)
        faults = _fault("layers", read[:rows])
        if logits is None:
            return None, faults
        wanted = len(batch.logit_rows)
        faults += rows_of_batch(_fault("lm_head", read[rows : rows + wanted]), batch)
        self._chosen = (logits, read[rows + wanted :].astype(np.int32))
        return logits, faults

    def _run(
        self, step: ServedStep, places: Places, cache: FastKvCache
    ) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Logits [L, V], and what is read of a step: flags [N], flags [L], highest tokens [L], as int64."""
        self._places = places
        batch = places.batch
        hidden = step.hidden(self, batch, cache)
        bad = ~torch.isfinite(hidden).all(1)
        if not len(batch.logit_rows):
            return None, bad.long()
        # As many rows as there are: all of them, in their order.
        are_all = len(batch.logit_rows) == len(batch.positions)
        taken = hidden if are_all else hidden[places.logit_rows]
        logits = step.logits(self, taken, batch, cache)
        bad_logits = ~torch.isfinite(logits).all(1)
        return logits, torch.cat([bad.long(), bad_logits.long(), logits.argmax(1)])

    # --- operators -----------------------------------------------------------------------------

    def _indices(self, array: Ints) -> torch.Tensor:
        places = self._places
        if places is not None:
            for known, there in (
                (places.batch.token_ids, places.token_ids),
                (places.batch.positions, places.positions),
                (places.batch.logit_rows, places.logit_rows),
            ):
                if array is known:
                    return there
        return torch.from_numpy(array.astype(np.int64)).to(self.device)

    def _places_of(self, batch: Batch) -> Places:
        if self._places is None or self._places.batch is not batch:
            self._places = Places.of(batch, self.device)
        return self._places

    def embed(self, table: FastMatrix, token_ids: Ints, scale: float | None, *, name: str) -> torch.Tensor:
        rows = table.data[self._indices(token_ids)]
        return rows if scale is None else (rows.float() * scale).to(rows.dtype)

    def linear(self, x: torch.Tensor, weight: FastMatrix, *, name: str) -> torch.Tensor:
        if name != "lm_head":
            return product(x, weight.data)
        return wide_product(x, weight.data)

    def linear_many(
        self, x: torch.Tensor, weights: Sequence[FastMatrix], *, names: Sequence[str]
    ) -> list[torch.Tensor]:
        """One product with all of them, whose weights lie below one another from the first time on."""
        key = tuple(map(id, weights))
        if key not in self._joined:
            self._joined[key] = (join(weights), tuple(weights))
        made = product(x, self._joined[key][0])
        return list(torch.split(made, [weight.rows for weight in weights], 1))

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, *, name: str) -> torch.Tensor:
        return elementwise.norm(x, weight, eps)

    def head_norm(
        self, x: torch.Tensor, weight: torch.Tensor, heads: int, eps: float, *, name: str
    ) -> Normed:
        """Normed where it is rotated, in one pass and with one rounding."""
        return Normed(x, weight, eps)

    def rope(
        self, x: Normed, heads: int, table: FastRotaryTable, positions: Ints, *, name: str
    ) -> torch.Tensor:
        table.reach(int(positions.max()))
        at = self._indices(positions)
        whole = torch.unflatten(x.x, 1, (heads, -1))
        return elementwise.heads(whole, x.weight, x.eps, table.cosines, table.sines, at).flatten(1)

    def kv_append(
        self, cache: FastKvCache, layer: int, k: torch.Tensor, v: torch.Tensor, batch: Batch
    ) -> None:
        places = self._places_of(batch)
        groups = cache.keys.shape[2]
        k, v = torch.unflatten(k, 1, (groups, -1)), torch.unflatten(v, 1, (groups, -1))
        elementwise.append(k, v, cache.keys[layer], cache.values[layer], places.blocks, places.offsets)
        self._appended = (layer, k, v)

    def attention(
        self,
        q: torch.Tensor,
        cache: FastKvCache,
        layer: int,
        batch: Batch,
        spec: AttentionSpec,
        *,
        name: str,
    ) -> torch.Tensor:
        places = self._places_of(batch)
        if places.is_decode:
            return decode_attention(q, cache.keys[layer], cache.values[layer], places, spec)
        k, v, keys = self._keys(cache, layer, places)
        by_head = torch.unflatten(q, 1, (spec.heads, -1))
        return prefill_attention(by_head, k, v, places.rows, keys, spec).flatten(1)

    def _keys(
        self, cache: FastKvCache, layer: int, places: Places
    ) -> tuple[torch.Tensor, torch.Tensor, Bounds]:
        """Keys and values [K, G, C] of every sequence up to its last row, and where each begins."""
        if self._appended is not None and self._appended[0] == layer and places.begins:
            # All of them were made in this very step.
            return self._appended[1], self._appended[2], places.rows
        keys, blocks, offsets = places.gathered()
        return cache.keys[layer][blocks, :, offsets], cache.values[layer][blocks, :, offsets], keys

    def add(self, a: torch.Tensor, b: torch.Tensor, *, name: str) -> torch.Tensor:
        return a + b

    def add_scaled(self, y: torch.Tensor, x: torch.Tensor, factor: float, *, name: str) -> torch.Tensor:
        return torch.add(y, x, alpha=factor)

    def scale(self, x: torch.Tensor, factor: float, *, name: str) -> torch.Tensor:
        return (x.float() * factor).to(x.dtype)

    def silu_gate(self, gate: torch.Tensor, up: torch.Tensor, *, name: str) -> torch.Tensor:
        return elementwise.gate(side_by_side(gate, up), is_silu=True)

    def gelu_gate(self, gate: torch.Tensor, up: torch.Tensor, *, name: str) -> torch.Tensor:
        return elementwise.gate(side_by_side(gate, up), is_silu=False)

    def softcap(self, x: torch.Tensor, cap: float, *, name: str) -> torch.Tensor:
        return cap * torch.tanh(x / cap)

    def take_rows(self, x: torch.Tensor, rows: Ints) -> torch.Tensor:
        return x[self._indices(rows)]

    # --- choosing ------------------------------------------------------------------------------

    def penalise(
        self,
        logits: torch.Tensor,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        self._chosen = None
        with torch.inference_mode():
            at, by = self._indices(token_ids), self.from_host(repetition)
            x = logits[row, at]
            x = torch.where(x > 0, x / by, x * by) - self.from_host(subtract)
            logits[row, at] = x
            if not bool(torch.isfinite(x).all()):
                self._faults.append(Fault("penalties", (row,)))

    def argmax(self, logits: torch.Tensor) -> Ints:
        if self._chosen is not None and self._chosen[0] is logits:
            return self._chosen[1]
        return logits.argmax(1).cpu().numpy().astype(np.int32)

    def token_weights(self, logits: torch.Tensor, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        x = logits[row].double()
        weights = torch.floor(torch.exp((x - x.max()) / temperature) * 2.0**32)
        return weights.long().cpu().numpy().astype(np.uint64)

    def log_normaliser(self, logits: torch.Tensor) -> npt.NDArray[np.float32]:
        return torch.logsumexp(logits, 1).cpu().numpy()


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T [N, rows]."""
    if fused.has_row(x, weight):
        return fused.row_product(x, weight, wide=False)
    return functional.linear(x, weight)


def wide_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x W^T with float32 results [N, rows]: logits rounded to bfloat16 would tie."""
    if fused.has_row(x, weight):
        return fused.row_product(x, weight, wide=True)
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    parts = [functional.linear(x.float(), piece.float()) for piece in torch.split(weight, _WIDENED)]
    return torch.cat(parts, 1)


def side_by_side(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """[N, I] and [N, I] as [N, 2 I]; without a copy where they are halves of one product."""
    width = gate.shape[1]
    is_one = up.data_ptr() - gate.data_ptr() == width * gate.element_size()
    if is_one and gate.stride() == up.stride() == (2 * width, 1):
        return gate.as_strided((len(gate), 2 * width), (2 * width, 1))
    return torch.cat([gate, up], 1)


def _fault(name: str, flags: npt.NDArray[np.int64]) -> list[Fault]:
    rows = tuple(int(row) for row in np.flatnonzero(flags))
    return [Fault(name, rows)] if rows else []
