"""The operators of training over tensors that have a shape and no values.

Running a step on them shows what it holds at each moment, on any lane that makes one tensor per
output and lets go of it with its last reference. Nothing of any size is allocated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from mens_core.ops import BLOCK, Batch, Ints
from mens_core.training_ops import AttentionSaved, TrainingOps

__all__ = ["Kind", "Meter", "Sized", "SizedOps"]

Kind = Literal["adapter", "moments", "gradients", "activations", "logits"]
_F32 = 4


class Meter:
    """What is held, by kind, and what was held when it was most."""

    def __init__(self) -> None:
        self._held: Counter[Kind] = Counter()
        self._total = 0
        self.most = 0
        """Bytes at the highest moment."""
        self.most_by_kind: dict[Kind, int] = {}

    def take(self, kind: Kind, nbytes: int) -> None:
        """Hold `nbytes` more."""
        self._held[kind] += nbytes
        self._total += nbytes
        if self._total > self.most:
            self.most, self.most_by_kind = self._total, dict(self._held)

    def give(self, kind: Kind, nbytes: int) -> None:
        """Let go of `nbytes`."""
        self._held[kind] -= nbytes
        self._total -= nbytes


class Sized:
    """A float32 tensor without values; it is held as long as there is a reference to it."""

    __slots__ = ("_kind", "_meter", "nbytes", "shape")

    def __init__(self, meter: Meter, kind: Kind, shape: tuple[int, ...], nbytes: int | None = None) -> None:
        self.shape = shape
        self.nbytes = int(np.prod(shape, dtype=object)) * _F32 if nbytes is None else nbytes
        self._meter, self._kind = meter, kind
        meter.take(kind, self.nbytes)

    def __del__(self) -> None:
        self._meter.give(self._kind, self.nbytes)


class SizedOps(TrainingOps):
    """Shapes in, shapes out."""

    def __init__(self, meter: Meter, weights: Mapping[int, tuple[int, int]]) -> None:
        """`weights`: the shape of each of the model's matrices, by the `id` of the lane's object."""
        self._meter = meter
        self._weights = weights

    def _new(self, name: str, *shape: int) -> Sized:
        return Sized(self._meter, _kind_of(name), shape)

    def _like(self, x: Sized, name: str) -> Sized:
        return self._new(name, *x.shape)

    def _shape_of(self, weight: Any) -> tuple[int, ...]:
        return weight.shape if isinstance(weight, Sized) else self._weights[id(weight)]

    # --- memory ------------------------------------------------------------------------------

    def from_host(self, x: npt.NDArray[np.float32]) -> Sized:
        return self._new("", *x.shape)

    def matrix(self, x: Sized, *, name: str) -> Sized:
        return Sized(self._meter, "adapter", x.shape)

    def to_host(self, x: Sized) -> npt.NDArray[np.float32]:
        """Return zeros that take no memory."""
        return np.broadcast_to(np.float32(0), x.shape)

    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> Sized:
        return self._new("", 2, layers, blocks, kv_heads, head_dim, BLOCK)

    def take_faults(self) -> list[Any]:
        return []

    # --- forward -----------------------------------------------------------------------------

    def embed(self, table: Any, token_ids: Ints, scale: float | None, *, name: str) -> Sized:
        return self._new(name, len(token_ids), self._shape_of(table)[1])

    def linear(self, x: Sized, weight: Any, *, name: str) -> Sized:
        return self._new(name, x.shape[0], self._shape_of(weight)[0])

    def rms_norm(self, x: Sized, weight: Any, eps: float, *, name: str) -> Sized:
        return self._like(x, name)

    def head_norm(self, x: Sized, weight: Any, heads: int, eps: float, *, name: str) -> Sized:
        return self._like(x, name)

    def rope(self, x: Sized, heads: int, table: Any, positions: Ints, *, name: str) -> Sized:
        return self._like(x, name)

    def kv_append(self, cache: Sized, layer: int, k: Sized, v: Sized, batch: Batch) -> None:
        """Nothing is made."""

    def attention(self, q: Sized, cache: Any, layer: int, batch: Batch, spec: Any, *, name: str) -> Sized:
        return self._like(q, name)

    def add(self, a: Sized, b: Sized, *, name: str) -> Sized:
        return self._like(a, name)

    def silu_gate(self, gate: Sized, up: Sized, *, name: str) -> Sized:
        return self._like(gate, name)

    def gelu_gate(self, gate: Sized, up: Sized, *, name: str) -> Sized:
        return self._like(gate, name)

    def softcap(self, x: Sized, cap: float, *, name: str) -> Sized:
        return self._like(x, name)

    def take_rows(self, x: Sized, rows: Ints) -> Sized:
        return self._new("", len(rows), x.shape[1])

    # --- backward ----------------------------------------------------------------------------

    def linear_backward(self, dy: Sized, weight: Any, *, name: str) -> Sized:
        return self._new(name, dy.shape[0], self._shape_of(weight)[1])

    def rms_norm_backward(self, dy: Sized, x: Sized, weight: Any, eps: float, *, name: str) -> Sized:
        return self._like(x, name)

    def head_norm_backward(
        self, dy: Sized, x: Sized, weight: Any, heads: int, eps: float, *, name: str
    ) -> Sized:
        return self._like(x, name)

    def rope_backward(self, dy: Sized, heads: int, table: Any, positions: Ints, *, name: str) -> Sized:
        return self._like(dy, name)

    def attention_saving(
        self, q: Sized, cache: Any, layer: int, batch: Batch, spec: Any, *, name: str
    ) -> AttentionSaved:
        rows = q.shape[0]
        return AttentionSaved(
            self._like(q, name), self._new(name, rows, spec.heads), self._new(name, rows, spec.heads)
        )

    def attention_backward(
        self,
        dy: Sized,
        q: Sized,
        saved: AttentionSaved,
        cache: Any,
        layer: int,
        batch: Batch,
        spec: Any,
        *,
        name: str,
    ) -> tuple[Sized, Sized, Sized]:
        keys = (q.shape[0], spec.kv_heads * spec.head_dim)
        return self._like(q, name), self._new(name, *keys), self._new(name, *keys)

    def silu_gate_backward(self, dy: Sized, gate: Sized, up: Sized, *, name: str) -> tuple[Sized, Sized]:
        return self._like(gate, name), self._like(gate, name)

    def gelu_gate_backward(self, dy: Sized, gate: Sized, up: Sized, *, name: str) -> tuple[Sized, Sized]:
        return self._like(gate, name), self._like(gate, name)

    def softcap_backward(self, dy: Sized, x: Sized, cap: float, *, name: str) -> Sized:
        return self._like(x, name)

    def put_rows(self, x: Sized, rows: Ints, count: int) -> Sized:
        return self._new("", count, x.shape[1])

    def join_rows(self, parts: Sequence[Sized]) -> Sized:
        return self._new("", sum(part.shape[0] for part in parts), parts[0].shape[1])

    def cross_entropy(self, logits: Sized, targets: Ints, *, name: str) -> tuple[Sized, Sized]:
        return self._new(name, logits.shape[0]), self._like(logits, name)

    def example_sums(self, losses: Sized, positions: Ints, starts: Ints) -> Sized:
        return self._new("", len(starts) - 1)

    # --- adapters and update -------------------------------------------------------------------

    def scale(self, x: Sized, factor: float, *, name: str) -> Sized:
        return self._like(x, name)

    def add_scaled(self, y: Sized, x: Sized, factor: float, *, name: str) -> Sized:
        return self._like(y, name)

    def dropout(
        self, x: Sized, rate: float, key: Any, positions: Ints, examples: Ints, *, name: str
    ) -> Sized:
        return self._like(x, name)

    def embed_backward(
        self, dy: Sized, token_ids: Ints, starts: Ints, rows: int, *, name: str
    ) -> list[Sized]:
        return [self._new(name, rows, dy.shape[1]) for _ in starts[1:]]

    def example_products(self, a: Sized, b: Sized, starts: Ints, *, name: str) -> list[Sized]:
        return [self._new(name, a.shape[1], b.shape[1]) for _ in starts[1:]]

    def sum_of_squares(self, x: Sized, *, name: str) -> np.float32:
        return np.float32(0)

    def adamw(self, parameter: Sized, gradient: Sized, m: Sized, v: Sized, by: Any, *, name: str) -> None:
        """Nothing is made."""

    # --- what no step of training calls ----------------------------------------------------------

    def load_matrix(self, stored: Any) -> NoReturn:
        raise _never("load_matrix")

    def load_vector(self, stored: Any, *, plus_one: bool = False) -> NoReturn:
        raise _never("load_vector")

    def rotary_table(self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None) -> NoReturn:
        raise _never("rotary_table")

    def penalise(self, logits: Any, row: int, token_ids: Ints, *, repetition: Any, subtract: Any) -> NoReturn:
        raise _never("penalise")

    def argmax(self, logits: Any) -> NoReturn:
        raise _never("argmax")

    def token_weights(self, logits: Any, row: int, temperature: float) -> NoReturn:
        raise _never("token_weights")

    def log_normaliser(self, logits: Any) -> NoReturn:
        raise _never("log_normaliser")


def _kind_of(name: str) -> Kind:
    if name.endswith((".gradient", ".sum", ".fold", ".mean")):
        return "gradients"
    return "logits" if name.startswith(("lm_head", "loss", "logit_softcap")) else "activations"


def _never(operator: str) -> AssertionError:
    return AssertionError(f"{operator} is no part of a training step")
