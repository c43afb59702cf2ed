"""The operator contract: what a lane implements, and all that a model may call.

A lane is one subclass of `Ops`. Tensors are the lane's own (`Tensor` is opaque here); integer
index arrays are numpy. Every operator is defined bit by bit in docs/numerics.md under its
name; a fused operator is declared here with its definition over the others, and a lane may
override it only with code that returns the same bits.

Shapes: N rows of a step (all sequences together), S sequences, D model width, H query heads,
G key/value heads, C head width, V vocabulary, L rows whose logits are wanted. All activations
are float32, row-major.

A non-finite value in an operator's output is recorded, not spread silently: `take_faults`
returns the operator's name and the rows since the last call.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mens_core.wishes import Reading, Wish, read_logits
from vox_plugin_api.checkpoint import Format

__all__ = [
    "BLOCK",
    "NOT_FINITE_REMEDY",
    "AttentionSpec",
    "Batch",
    "Fault",
    "Format",
    "Ops",
    "ServedLayer",
    "ServedStep",
    "StoredTensor",
    "Tensor",
    "is_quantised",
    "rows_of_batch",
]

BLOCK = 128
"""Positions per KV block; absolute: block b holds positions [128 b, 128 b + 128)."""

Tensor = Any
Matrix = Any
"""A weight [rows, columns] in whatever packing the lane likes; its `nbytes` are what it takes."""
KvCache = Any
RotaryTable = Any
Ints = npt.NDArray[np.int32]


def is_quantised(weight_format: Format) -> bool:
    """Whether `linear` quantises its activations for this weight format."""
    return weight_format not in ("f32", "f16", "bf16")


NOT_FINITE_REMEDY = (
    "an import copies weights as they are, so the file that the model was imported from holds this: take the "
    "model from elsewhere, or a release of it whose weights are finite"
)
"""For `weights-not-finite`: to import the same file again would change nothing."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as it lies in the checkpoint; `data` is a view into the file's mapping."""

    name: str
    format: Format
    shape: tuple[int, ...]
    """Logical shape; for a quantised matrix [rows, columns], `data` being raw GGML blocks row by row."""
    data: memoryview
    taken: Callable[[int], None] = lambda nbytes: None
    """To be told how many leading bytes of `data` are no longer needed: a lane that repacks a
    large tensor piece by piece then never holds it twice."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step over S sequences: a ragged list of rows, each a token at a position.

    Rows of one sequence are contiguous and ascending in position.
    """

    token_ids: Ints
    """[N]"""
    positions: Ints
    """[N] absolute position of each row in its sequence."""
    starts: Ints
    """[S + 1] sequence s owns rows starts[s] to starts[s + 1]."""
    block_tables: Ints
    """[S, blocks] KV block of each 128 positions of a sequence; -1 beyond its end."""
    logit_rows: Ints
    """[L] rows whose logits are wanted, ascending."""


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The constants of one layer's attention."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    """Multiplies each score, after the dot product (a float32 value)."""
    window: int | None = None
    """Sliding window: position p sees [p - window + 1, p]; None: all of [0, p]."""
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """An operator whose output was not finite."""

    name: str
    rows: tuple[int, ...]


def rows_of_batch(faults: Sequence[Fault], batch: Batch) -> list[Fault]:
    """The same faults, their rows numbered in the batch instead of among its `logit_rows`."""
    return [Fault(fault.name, tuple(int(batch.logit_rows[row]) for row in fault.rows)) for fault in faults]


class ServedLayer(Protocol):
    """One decoder layer of a model: operators, called in an order that no value decides."""

    def forward(self, ops: Ops, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[N, D] to [N, D]; what later positions need of these rows goes into `cache`."""
        ...


class ServedStep(Protocol):
    """A model's step, in the two halves between which rows are taken."""

    def hidden(self, ops: Ops, batch: Batch, cache: KvCache) -> Tensor:
        """The batch's tokens to [N, D]: embedding and layers."""
        ...

    def logits(self, ops: Ops, hidden: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[L, D] to [L, V]."""
        ...

    def greatest(self, ops: Ops, hidden: Tensor, batch: Batch, cache: KvCache) -> Ints | None:
        """[L, D] to the `argmax` of the logits [L] by `Ops.greatest`; None where they take more."""
        ...


class Ops(ABC):
    """The operators of one lane. `name` says which tensor of the model is being made."""

    kv_is_taken_when_touched = False
    """Whether a block of the KV cache takes memory only once something is written to it."""

    # --- memory ------------------------------------------------------------------------------

    @abstractmethod
    def load_matrix(self, stored: StoredTensor) -> Matrix:
        """Take a weight [rows, columns] in any `Format`; the mapping may be dropped afterwards."""

    @abstractmethod
    def load_vector(self, stored: StoredTensor, *, plus_one: bool = False) -> Tensor:
        """Take a float vector as f32; `plus_one` adds 1 (one rounding), as Gemma's norms want."""

    @abstractmethod
    def new_kv_cache(self, *, layers: int, kv_heads: int, head_dim: int, blocks: int) -> KvCache:
        """Reserve `blocks` KV blocks of 128 positions for every layer, in f32."""

    @abstractmethod
    def rotary_table(
        self, frequencies: Sequence[int], attention_factor: tuple[int, int] | None
    ) -> RotaryTable:
        """Cosines and sines for positions as needed, from frequencies in turns per position.

        Args:
            frequencies: C / 2 fixed-point numbers, each floor(turns * 2^128).
            attention_factor: exact rational that multiplies cosine and sine before their one
                rounding (YaRN), or None for 1.
        """

    @abstractmethod
    def to_host(self, x: Tensor) -> npt.NDArray[np.float32]:
        """Return `x` as a numpy array (a copy or a view; synchronises a device)."""

    @abstractmethod
    def take_faults(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first."""

    def facts(self) -> dict[str, Any]:
        """Say what the load report tells about the lane (instruction set, threads); never compared."""
        return {}

    # --- operators ---------------------------------------------------------------------------

    @abstractmethod
    def embed(self, table: Matrix, token_ids: Ints, scale: float | None, *, name: str) -> Tensor:
        """Rows of `table`, dequantised to f32, times `scale` (one rounding): [N, D]."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Matrix, *, name: str) -> Tensor:
        """x W^T, each output in C128 order (float weights) or exact integer blocks: [N, rows]."""

    def linear_many(self, x: Tensor, weights: Sequence[Matrix], *, names: Sequence[str]) -> list[Tensor]:
        """Fusion: `linear` of the same x with several weights (activations are quantised once)."""
        return [self.linear(x, weight, name=name) for weight, name in zip(weights, names, strict=True)]

    def greatest(self, x: Tensor, weight: Matrix, *, name: str) -> Ints:
        """Fusion: `argmax` of `linear`; a lane need not compute all outputs: [N]."""
        return self.argmax(self.linear(x, weight, name=name))

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, name: str) -> Tensor:
        """(x * (1 / sqrt(C128(x x) / D + eps))) * weight, row by row: [N, D]."""

    @abstractmethod
    def head_norm(self, x: Tensor, weight: Tensor, heads: int, eps: float, *, name: str) -> Tensor:
        """`rms_norm` of each head's C values: [N, heads * C], weight [C]."""

    @abstractmethod
    def rope(self, x: Tensor, heads: int, table: RotaryTable, positions: Ints, *, name: str) -> Tensor:
        """Rotate each head's halves (x1, x2) by its position's angles: [N, heads * C]."""

    @abstractmethod
    def kv_append(self, cache: KvCache, layer: int, k: Tensor, v: Tensor, batch: Batch) -> None:
        """Store k and v [N, G * C] at their rows' positions in their sequences' blocks."""

    @abstractmethod
    def attention(
        self, q: Tensor, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> Tensor:
        """Causal attention over KV blocks in ascending order (docs/numerics.md): [N, H * C]."""

    @abstractmethod
    def add(self, a: Tensor, b: Tensor, *, name: str) -> Tensor:
        """a + b, one rounding."""

    @abstractmethod
    def silu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        """silu(gate) * up."""

    @abstractmethod
    def gelu_gate(self, gate: Tensor, up: Tensor, *, name: str) -> Tensor:
        """gelu_tanh(gate) * up."""

    @abstractmethod
    def softcap(self, x: Tensor, cap: float, *, name: str) -> Tensor:
        """cap * tanh(x / cap)."""

    @abstractmethod
    def take_rows(self, x: Tensor, rows: Ints) -> Tensor:
        """x[rows]: [L, D]."""

    def run_layers(self, x: Tensor, layers: Sequence[ServedLayer], batch: Batch, cache: KvCache) -> Tensor:
        """Fusion: the layers one after another, [N, D] to [N, D]; a lane may read them once and keep that."""
        for layer in layers:
            x = layer.forward(self, x, batch, cache)
        return x

    def run_step(self, step: ServedStep, batch: Batch, cache: KvCache) -> tuple[Tensor | None, list[Fault]]:
        """Fusion: a whole step; logits [L, V] of the rows that want them, and faults by the batch's rows."""
        self.take_faults()  # of a step that was given up half-way: its rows are not these
        hidden = step.hidden(self, batch, cache)
        faults = list(self.take_faults())
        if not len(batch.logit_rows):
            return None, faults
        logits = step.logits(self, self.take_rows(hidden, batch.logit_rows), batch, cache)
        # From here on a lane numbers the rows that were taken.
        return logits, faults + rows_of_batch(self.take_faults(), batch)

    def run_and_read(
        self, step: ServedStep, batch: Batch, cache: KvCache, wishes: Sequence[Wish]
    ) -> tuple[Tensor | None, list[Fault], list[Reading]]:
        """Fusion: `run_step`, and what is wished of rows of its logits; a lane may wait once for both.

        Wishes of a row that has a fault are not read: an empty `Reading`.
        """
        logits, faults = self.run_step(step, batch, cache)
        return logits, faults, self.read_step(logits, faults, batch, wishes)

    def read_step(
        self, logits: Tensor, faults: Sequence[Fault], batch: Batch, wishes: Sequence[Wish]
    ) -> list[Reading]:
        """What is wished of the logits of a step with these faults, one reading per wish."""
        if not faults:
            return read_logits(self, logits, wishes)
        spoiled = {row for fault in faults for row in fault.rows}
        left = [i for i, wish in enumerate(wishes) if int(batch.logit_rows[wish.row]) not in spoiled]
        readings = [Reading() for _ in wishes]
        for i, reading in zip(left, read_logits(self, logits, [wishes[i] for i in left]), strict=True):
            readings[i] = reading
        return readings

    # --- choosing tokens -----------------------------------------------------------------------

    @abstractmethod
    def penalise(
        self,
        logits: Tensor,
        row: int,
        token_ids: Ints,
        *,
        repetition: npt.NDArray[np.float32],
        subtract: npt.NDArray[np.float32],
    ) -> None:
        """In place on one row: x > 0 ? x / repetition : x * repetition, then x - subtract, per id."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Ints:
        """Highest logit of each row, the lowest id on ties (-0 counts as +0): [L]."""

    @abstractmethod
    def token_weights(self, logits: Tensor, row: int, temperature: float) -> npt.NDArray[np.uint64]:
        """floor(exp((x - max) / T) * 2^32) of one row, as integers in [0, 2^32]: [V]."""

    @abstractmethod
    def log_normaliser(self, logits: Tensor) -> npt.NDArray[np.float32]:
        """m + log(C128 sum of exp(x - m)) of each row; a logprob is x - that, one rounding: [L]."""
