"""An `Ops` that lets another one do everything: the base of lanes that change one thing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.conformance.inputs import Floats, stored_float
from mens_core.ops import (
    AttentionSpec,
    Batch,
    Fault,
    Ints,
    KvCache,
    Matrix,
    Ops,
    RotaryTable,
    StoredTensor,
    Tensor,
)

__all__ = ["PassingOps"]


class PassingOps(Ops):
    """Every call goes to `lane`."""

    def __init__(self, lane: Ops) -> None:
        self.lane = lane

    def tensor(self, values: Floats) -> Tensor:
        """Return rows of numbers as a tensor of the lane; the contract's way in is an embedding."""
        table = self.lane.load_matrix(stored_float(np.ascontiguousarray(values, np.float32), "made"))
        return self.lane.embed(table, np.arange(len(values), dtype=np.int32), None, name="made")

    def values(self, x: Tensor) -> Floats:
        """Return a tensor's numbers, copied."""
        return np.array(self.lane.to_host(x), np.float32)

    def load_matrix(self, stored: StoredTensor) -> Matrix:
        return self.lane.load_matrix(stored)

    def load_vector(self, stored: StoredTensor, *, plus_one: bool = False) -> Tensor:
        return self.lane.load_vector(stored, plus_one=plus_one)

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> KvCache:
        return self.lane.new_kv_cache(layers=layers, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks)

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> RotaryTable:
        return self.lane.rotary_table(frequencies, attention_factor)

    def to_host(self, x: Tensor) -> npt.NDArray[np.float32]:
        return self.lane.to_host(x)

    def take_faults(self) -> list[Fault]:
        return self.lane.take_faults()

    def facts(self) -> dict[str, Any]:
        return self.lane.facts()

    def embed(self, table: Matrix, token_ids: Ints, scale: float | None, *, name: str) -> Tensor:
        return self.lane.embed(table, token_ids, scale, name=name)

    def linear(self, x: Tensor, weight: Matrix, *, name: str) -> Tensor:
        return self.lane.linear(x, weight, name=name)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, name: str) -> Tensor:
        return self.lane.rms_norm(x, weight, eps, name=name)

    def head_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float, *, name: str) -> Tensor:
        return self.lane.head_norm(x, weight, heads, eps, name=name)

    def rope(self, x: Tensor, heads: int, table: RotaryTable, positions: Ints, *, name: str) -> Tensor:
        return self.lane.rope(x, heads, table, positions, name=name)

    def kv_append(self, cache: KvCache, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        self.lane.kv_append(cache, layer, k, v, batch)

    def attention(
        self, q: Tensor, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Tensor:
        return self.lane.attention(q, cache, layer, batch, spec, name=name)

    def add(self, a: Tensor, b: Tensor, *, name: str) -> Tensor:
        return self.lane.add(a, b, name=name)

    def silu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        return self.lane.silu_gate(gate, up, name=name)

    def gelu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        return self.lane.gelu_gate(gate, up, name=name)

    def softcap(self, x: Tensor, cap: float, *, name: str) -> Tensor:
        return self.lane.softcap(x, cap, name=name)

    def take_rows(self, x: Tensor, rows: Ints) -> Tensor:
        return self.lane.take_rows(x, rows)

    def penalise(
        self,
        logits: Tensor,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        self.lane.penalise(logits, row, token_ids, repetition=repetition, subtract=subtract)

    def argmax(self, logits: Tensor) -> Ints:
        return self.lane.argmax(logits)

    def token_weights(self, logits: Tensor, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        return self.lane.token_weights(logits, row, temperature)

    def log_normaliser(self, logits: Tensor) -> npt.NDArray[np.float32]:
        return self.lane.log_normaliser(logits)
