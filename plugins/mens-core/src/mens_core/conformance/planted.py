"""Broken lanes, on purpose: the mistakes that lanes really make, each over any lane.

A suite is worth what it catches. `PLANTED` is shipped so that anyone can see it catch these, in
their own lane too: wrap it, run `vox-host plugin check`, and read which operator is named.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mens_core.conformance.passing import PassingOps
from mens_core.conformance.planted_flush import keep_subnormals
from mens_core.conformance.planted_fma import NumpyFmaOps
from mens_core.conformance.planted_fma_training import with_training_fma
from mens_core.conformance.planted_weights import HeldMatrix, HeldRotary, RememberingOps
from mens_core.ops import (
    AttentionSpec,
    Batch,
    Ints,
    KvCache,
    Matrix,
    Ops,
    RotaryTable,
    Tensor,
    is_quantised,
)
from mens_core.rotary import table as rotary_values

__all__ = ["PLANTED", "Planted", "RoundedToBf16"]

F32 = np.float32


class _OwnProduct(RememberingOps):
    """Changes products with float weights."""

    def linear(self, x: Tensor, weight: HeldMatrix, *, name: str) -> Tensor:
        if is_quantised(weight.format):
            return super().linear(x, weight, name=name)
        return self.product(x, weight, name)

    @abstractmethod
    def product(self, x: Tensor, weight: HeldMatrix, name: str) -> Tensor:
        """Return x times the weight's transpose, with the mistake: [N, rows]."""


class ReassociatedSum(_OwnProduct):
    """A library's product: the right terms, added in an order of its own."""

    def product(self, x: Tensor, weight: HeldMatrix, name: str) -> Tensor:
        terms = self.values(x)[:, :, None] * self.dense(weight)[None]
        return self.tensor(np.add.reduce(terms.transpose(0, 2, 1), axis=2, dtype=F32))


class Tf32Rounding(_OwnProduct):
    """Operands cut to the 10 fraction bits of a tensor core."""

    def product(self, x: Tensor, weight: HeldMatrix, name: str) -> Tensor:
        bits = self.values(x).view(np.uint32)
        rounded = (
            (bits + np.uint32(0x0FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
        ) << np.uint32(13)
        return self.lane.linear(self.tensor(rounded.view(F32)), weight.inner, name=name)


class UnfusedProduct(_OwnProduct):
    """a * b is rounded before it is added, where one rounding is written."""

    def product(self, x: Tensor, weight: HeldMatrix, name: str) -> Tensor:
        terms = self.values(x)[:, :, None] * self.dense(weight)[None]
        total = np.zeros((terms.shape[0], terms.shape[2]), F32)
        for start in range(0, terms.shape[1], 128):
            chunk = np.zeros_like(total)
            for k in range(start, min(start + 128, terms.shape[1])):
                chunk = chunk + terms[:, k]
            total = chunk if start == 0 else total + chunk
        return self.tensor(total)


class FusedMultiplyAdd(RememberingOps):
    """a * b + c with one rounding, where two are written: the second product of a rotation."""

    def rope(self, x: Tensor, heads: int, table: HeldRotary, positions: Ints, *, name: str) -> Tensor:
        rows = self.values(x).astype(np.float64)
        made = np.empty_like(rows)
        for row, position in enumerate(positions.tolist()):
            cos, sin = rotary_values(table.frequencies, table.factor, range(position, position + 1))
            halves = rows[row].reshape(heads, 2, -1)
            first = halves[:, 0] * cos[0] - halves[:, 1] * sin[0]
            second = halves[:, 1] * cos[0] + halves[:, 0] * sin[0]
            made[row] = np.stack([first, second], axis=1).reshape(-1)
        return self.tensor(made.astype(F32))


class WrongRotaryTable(PassingOps):
    """Each pair turns with its neighbour's frequency."""

    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> RotaryTable:
        return self.lane.rotary_table([*frequencies[1:], frequencies[-1]], attention_factor)


class MissingHeadNorm(PassingOps):
    """Queries and keys as the projections left them."""

    def head_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float, *, name: str) -> Tensor:
        return x


class NeighbourRace(PassingOps):
    """One scratch buffer for all sequences of a step: with three or more the last reads the first's."""

    def attention(
        self, q: Tensor, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Tensor:
        made = self.lane.attention(q, cache, layer, batch, spec, name=name)
        if len(batch.starts) < 4:
            return made
        rows = self.values(made)
        rows[-1, : spec.head_dim] = rows[0, : spec.head_dim]
        return self.tensor(rows)


class TimingRace(PassingOps):
    """A thread that is late once in a while: the last sum of its row is left out."""

    def __init__(self, lane: Ops) -> None:
        super().__init__(lane)
        self._calls = 0

    def linear(self, x: Tensor, weight: Matrix, *, name: str) -> Tensor:
        made = self.lane.linear(x, weight, name=name)
        self._calls += 1
        # Rare enough that a lane passes its self-test, as real ones do.
        if self._calls % 211 or name in (
            "many",
            "one",
            "tail",
            "extremes",
            "tripwires",
            "flushed",
            "rounding",
        ):
            return made
        rows = self.values(made)
        rows[-1, -1] = 0
        return self.tensor(rows)


def _wrong_gradient(lane: Ops) -> Ops:
    """The right forward, and a norm whose gradient takes the row's scale for a constant."""

    class WrongGradient(type(lane)):  # type: ignore[misc]  # whatever lane it is, changed in one place
        def rms_norm_backward(
            self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, name: str
        ) -> Tensor:
            values = np.array(self.to_host(x), F32)
            inverse = F32(1) / np.sqrt(np.mean(values * values, axis=1, keepdims=True, dtype=F32) + F32(eps))
            return self.from_host(np.array(self.to_host(dy)) * np.array(self.to_host(weight)) * inverse)

    planted = copy.copy(lane)
    planted.__class__ = WrongGradient
    return planted


class RoundedToBf16(PassingOps):
    """Every operator's output rounded to bfloat16: what a fast engine does, and no mistake.

    The tolerance of models whose numerics promise no bits is measured with it.
    """

    def _rounded(self, x: Tensor) -> Tensor:
        bits = self.values(x).view(np.uint32)
        upper = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return self.tensor((upper << np.uint32(16)).view(F32))

    def embed(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.embed(*arguments, **named))

    def linear(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.linear(*arguments, **named))

    def rms_norm(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.rms_norm(*arguments, **named))

    def head_norm(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.head_norm(*arguments, **named))

    def rope(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.rope(*arguments, **named))

    def attention(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.attention(*arguments, **named))

    def add(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.add(*arguments, **named))

    def silu_gate(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.silu_gate(*arguments, **named))

    def gelu_gate(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.gelu_gate(*arguments, **named))

    def softcap(self, *arguments: Any, **named: Any) -> Tensor:
        return self._rounded(self.lane.softcap(*arguments, **named))


@dataclass(frozen=True, slots=True)
class Planted:
    """One mistake."""

    plant: Callable[[Ops], Ops]
    operator: str
    """What the suite must name."""


PLANTED: Mapping[str, Planted] = MappingProxyType(
    {
        "fused-multiply-add": Planted(FusedMultiplyAdd, "rope"),
        # In every operator that has an fma; the first by name.
        "double-rounded-fma": Planted(NumpyFmaOps, "attention"),
        "unfused-product": Planted(UnfusedProduct, "linear"),
        "reassociated-sum": Planted(ReassociatedSum, "linear"),
        "tf32-rounding": Planted(Tf32Rounding, "linear"),
        "missing-head-norm": Planted(MissingHeadNorm, "head_norm"),
        "wrong-rotary-table": Planted(WrongRotaryTable, "rope"),
        "neighbour-race": Planted(NeighbourRace, "attention"),
        "timing-race": Planted(TimingRace, "linear"),
        # In one operator; `keep_subnormals` plants it in any other that has an intermediate result.
        "kept-subnormals": Planted(keep_subnormals, "softcap"),
        # Over a lane that trains.
        "wrong-gradient": Planted(_wrong_gradient, "rms_norm_backward"),
        # In every operator of training that has an fma; the first by name.
        "double-rounded-training-fma": Planted(with_training_fma, "attention_backward"),
    }
)
