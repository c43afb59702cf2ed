"""An `Ops` that lets another one work and writes down a digest of everything it made.

Two lanes that should agree are compared by these lists: the first entry that differs names the
operator and the layer. Nothing is kept but digests, and the outputs that were asked for.
A loaded model is traced by `dataclasses.replace(model, ops=TracingOps(model.ops))`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

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
from mens_core.training_ops import TrainingOps

__all__ = ["TracedOperator", "TracingOps"]


@dataclass(frozen=True, slots=True)
class TracedOperator:
    """One operator call's output."""

    name: str
    """What was made: "layers.0.self_attn.q_proj"."""
    operator: str
    """By which operator: "linear"."""
    shape: tuple[int, ...]
    dtype: str
    digest: str
    """SHA-256 of the little-endian row-major bytes, in hex."""


class TracingOps(Ops):
    """Wraps a lane; copies every output to the host, so it is slow."""

    def __init__(self, lane: Ops, *, keep: Collection[str] = ()) -> None:
        self._lane = lane
        self._keep = frozenset(keep)
        self.operators: list[TracedOperator] = []
        self.kept: dict[str, npt.NDArray[np.float32]] = {}
        """Outputs whose names were asked for; of several with one name, the last."""

    def _record(self, operator: str, name: str, made: Tensor) -> Tensor:
        array = np.ascontiguousarray(self._lane.to_host(made), dtype="<f4")
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        self.operators.append(TracedOperator(name, operator, array.shape, "f32", digest))
        if name in self._keep:
            self.kept[name] = array.copy()
        return made

    def load_matrix(self, stored: StoredTensor) -> Matrix:
        return self._lane.load_matrix(stored)

    def load_vector(self, stored: StoredTensor, *, plus_one: bool = False) -> Tensor:
        return self._lane.load_vector(stored, plus_one=plus_one)

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> KvCache:
        return self._lane.new_kv_cache(layers=layers, kv_heads=kv_heads, head_dim=head_dim, blocks=blocks)

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> RotaryTable:
        return self._lane.rotary_table(frequencies, attention_factor)

    def to_host(self, x: Tensor) -> npt.NDArray[np.float32]:
        return self._lane.to_host(x)

    def take_faults(self) -> list[Fault]:
        return self._lane.take_faults()

    def embed(self, table: Matrix, token_ids: Ints, scale: float | None, *, name: str) -> Tensor:
        return self._record("embed", name, self._lane.embed(table, token_ids, scale, name=name))

    def linear(self, x: Tensor, weight: Matrix, *, name: str) -> Tensor:
        return self._record("linear", name, self._lane.linear(x, weight, name=name))

    def linear_many(self, x: Tensor, weights: Sequence[Matrix], *, names: Sequence[str]) -> list[Tensor]:
        # The lane's own fusion runs; what it made is recorded as the `linear` calls it stands for.
        made = self._lane.linear_many(x, weights, names=names)
        return [self._record("linear", name, y) for name, y in zip(names, made, strict=True)]

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, name: str) -> Tensor:
        return self._record("rms_norm", name, self._lane.rms_norm(x, weight, eps, name=name))

    def head_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float, *, name: str) -> Tensor:
        return self._record("head_norm", name, self._lane.head_norm(x, weight, heads, eps, name=name))

    def rope(self, x: Tensor, heads: int, table: RotaryTable, positions: Ints, *, name: str) -> Tensor:
        return self._record("rope", name, self._lane.rope(x, heads, table, positions, name=name))

    def kv_append(self, cache: KvCache, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        # Makes nothing new: k and v were recorded when they were made.
        self._lane.kv_append(cache, layer, k, v, batch)

    def attention(
        self, q: Tensor, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Tensor:
        made = self._lane.attention(q, cache, layer, batch, spec, name=name)
        return self._record("attention", name, made)

    def add(self, a: Tensor, b: Tensor, *, name: str) -> Tensor:
        return self._record("add", name, self._lane.add(a, b, name=name))

    def scale(self, x: Tensor, factor: float, *, name: str) -> Tensor:
        # Of an embedding with an update, behind the sum.
        made = cast(TrainingOps, self._lane).scale(x, factor, name=name)
        return self._record("scale", name, made)

    def add_scaled(self, y: Tensor, x: Tensor, factor: float, *, name: str) -> Tensor:
        """Of an adapted model: its lane has the operators of training."""
        made = cast(TrainingOps, self._lane).add_scaled(y, x, factor, name=name)
        return self._record("add_scaled", name, made)

    def silu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        return self._record("silu_gate", name, self._lane.silu_gate(gate, up, name=name))

    def gelu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        return self._record("gelu_gate", name, self._lane.gelu_gate(gate, up, name=name))

    def softcap(self, x: Tensor, cap: float, *, name: str) -> Tensor:
        return self._record("softcap", name, self._lane.softcap(x, cap, name=name))

    def take_rows(self, x: Tensor, rows: Ints) -> Tensor:
        return self._lane.take_rows(x, rows)

    def penalise(
        self,
        logits: Tensor,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        self._lane.penalise(logits, row, token_ids, repetition=repetition, subtract=subtract)

    def argmax(self, logits: Tensor) -> Ints:
        return self._lane.argmax(logits)

    def token_weights(self, logits: Tensor, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        return self._lane.token_weights(logits, row, temperature)

    def log_normaliser(self, logits: Tensor) -> npt.NDArray[np.float32]:
        return self._lane.log_normaliser(logits)
