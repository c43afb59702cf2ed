"""The operators of training: what a lane adds to `Ops` to carry gradients and take a step.

The same rules as in `ops`: every operator is defined bit by bit in docs/numerics.md under its
name, and faults are recorded under the name that is given. A lane without the capability
"train" implements `Ops` alone.

A step trains on examples. E examples of a micro-batch are E sequences of one `Batch`; example e
owns the rows starts[e] to starts[e + 1]. Gradients of parameters are made per example, so that
neither micro-batches nor packing change a bit; `dy` is the gradient of the summed loss with
respect to an operator's output y. Base weights are frozen: they have no gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from mens_core.ops import AttentionSpec, Batch, Ints, KvCache, Matrix, Ops, RotaryTable, Tensor

__all__ = ["AdamW", "AdapterOps", "AttentionSaved", "DropoutKey", "TrainingOps"]


@dataclass(frozen=True, slots=True)
class AttentionSaved:
    """What attention's backward needs of its forward beside q, k and v."""

    out: Tensor
    """[N, H * C]"""
    m: Tensor
    """[N, H] the running maximum after the last block."""
    l: Tensor  # noqa: E741 - the name that docs/numerics.md gives it
    """[N, H] the running sum of exp(s - m)."""


@dataclass(frozen=True, slots=True)
class DropoutKey:
    """Which random words decide: Philox key and the counter's fixed parts (docs/numerics.md)."""

    seed: int
    """Of the run, below 2^64."""
    step: int
    """Optimizer step, from 0, below 2^32."""
    layer: int
    """Number of the adapted matrix in the adapter's bytewise key order, below 2^16."""

    def __post_init__(self) -> None:
        # Native code takes words: a wider number would be cut without a word.
        if not (0 <= self.seed < 1 << 64 and 0 <= self.step < 1 << 32 and 0 <= self.layer < 1 << 16):
            raise ValueError(f"{self} does not fit 64, 32 and 16 bits")


@dataclass(frozen=True, slots=True)
class AdamW:
    """Constants of one AdamW step, each a float32 value made by exact rules (docs/numerics.md)."""

    learning_rate: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    eps: float
    decay: float
    """1 - learning_rate * weight_decay."""
    correction1: float
    """1 - beta1^t, t counting from 1."""
    correction2: float
    """1 - beta2^t."""

    def in_order(self) -> tuple[float, ...]:
        """Return the nine constants in the order of the fields."""
        return astuple(self)


class AdapterOps(Ops):
    """`Ops`, with what serving an adapter beside the weights takes."""

    @abstractmethod
    def from_host(self, x: npt.NDArray[np.float32]) -> Tensor:
        """Take a float32 array of any shape as a tensor (a copy)."""

    @abstractmethod
    def matrix(self, x: Tensor, *, name: str) -> Matrix:
        """Take a float32 tensor [rows, columns] as a weight for `linear`; later changes of x don't show."""

    def all_to_host(self, tensors: Sequence[Tensor]) -> list[npt.NDArray[np.float32]]:
        """`to_host` of each; a lane may wait once for all of them."""
        return [self.to_host(x) for x in tensors]

    def matrices(self, tensors: Sequence[Tensor], names: Sequence[str]) -> list[Matrix]:
        """`matrix` of each."""
        return [self.matrix(x, name=name) for x, name in zip(tensors, names, strict=True)]

    @abstractmethod
    def add_scaled(self, y: Tensor, x: Tensor, factor: float, *, name: str) -> Tensor:
        """y + x * factor: a product rounded, then a sum rounded."""

    def add_product(
        self, y: Tensor, x: Tensor, weight: Matrix, factor: float, *, product: str, name: str
    ) -> Tensor:
        """y + (x W^T) * factor: `linear` named `product`, then `add_scaled`; a lane may join them."""
        return self.add_scaled(y, self.linear(x, weight, name=product), factor, name=name)

    @abstractmethod
    def scale(self, x: Tensor, factor: float, *, name: str) -> Tensor:
        """x * factor, one rounding; the average over a step is `scale` by 1 / its trained tokens."""


class TrainingOps(AdapterOps):
    """`AdapterOps`, with a backward for each operator that has one, the loss, and the update."""

    # --- memory ------------------------------------------------------------------------------

    memory_place: Literal["host", "device"] = "host"
    """Where tensors and weights lie."""
    rows_at_once: int = 512
    """Rows of a micro-batch whose size nobody chose; one longer example runs alone."""
    logit_rows_at_once: int = 128
    """Rows whose logits are made together: whole chunks of 128."""
    layers_between_looks: int = 1
    """Layers that run before a micro-batch asks for faults again, which may have to wait for a device."""

    def workspace_bytes(self, *, lengths: Sequence[int], widest: int, kv_heads: int, head_dim: int) -> int:
        """What one operator takes beside its results, at most; a lane that takes some says how much.

        Args:
            lengths: rows of each example of a micro-batch.
            widest: the most inputs or outputs of a layer's matrix.
        """
        return 0

    def release_freed(self) -> None:
        """Give back to the system what allocators keep of freed tensors.

        Asked for right before the moments that hold most, so that holes of earlier ones don't come on
        top. A lane does what it can.
        """

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """What a `matrix` of float32 takes."""
        return 4 * rows * columns

    def copy(self, x: Tensor) -> Tensor:
        """x in memory of its own."""
        return self.from_host(self.to_host(x))

    def copies(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """`copy` of each; a lane may lay them so that the operators of many tensors are few launches."""
        return [self.copy(x) for x in tensors]

    # --- backward of the forward's operators ------------------------------------------------------

    @abstractmethod
    def linear_backward(self, dy: Tensor, weight: Matrix, *, name: str) -> Tensor:
        """dy W, each element C128 over W's rows, weights dequantised to f32: [N, rows] to [N, columns]."""

    def add_product_backward(
        self, dx: Tensor, dy: Tensor, weight: Matrix, *, product: str, name: str
    ) -> Tensor:
        """dx + dy W: `linear_backward` under the name `product`, then `add`; a lane may join them."""
        return self.add(dx, self.linear_backward(dy, weight, name=product), name=name)

    @abstractmethod
    def rms_norm_backward(self, dy: Tensor, x: Tensor, weight: Tensor, eps: float, *, name: str) -> Tensor:
        """Gradient of `rms_norm` with respect to x: [N, D]."""

    @abstractmethod
    def head_norm_backward(
        self, dy: Tensor, x: Tensor, weight: Tensor, heads: int, eps: float, *, name: str
    ) -> Tensor:
        """Gradient of `head_norm` with respect to x: [N, heads * C]."""

    @abstractmethod
    def rope_backward(
        self, dy: Tensor, heads: int, table: RotaryTable, positions: Ints, *, name: str
    ) -> Tensor:
        """`rope` by the negative angles: [N, heads * C]."""

    @abstractmethod
    def attention_saving(
        self, q: Tensor, cache: KvCache, layer: int, batch: Batch, spec: AttentionSpec, *, name: str
    ) -> AttentionSaved:
        """`attention`, keeping what its backward needs."""

    @abstractmethod
    def attention_backward(
        self,
        dy: Tensor,
        q: Tensor,
        saved: AttentionSaved,
        cache: KvCache,
        layer: int,
        batch: Batch,
        spec: AttentionSpec,
        *,
        name: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q [N, H * C], k and v [N, G * C].

        Every sequence of the batch starts at position 0 and has all its rows in the batch; its
        keys and values are read from `cache`.
        """

    @abstractmethod
    def silu_gate_backward(self, dy: Tensor, gate: Tensor, up: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""

    @abstractmethod
    def gelu_gate_backward(self, dy: Tensor, gate: Tensor, up: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        """Gradients of gate and up."""

    @abstractmethod
    def softcap_backward(self, dy: Tensor, x: Tensor, cap: float, *, name: str) -> Tensor:
        """Gradient of `softcap` with respect to its input x."""

    @abstractmethod
    def put_rows(self, x: Tensor, rows: Ints, count: int) -> Tensor:
        """[L, D] to [count, D]: row i goes to rows[i] (ascending, distinct), all others are +0."""

    def join_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """[L1, D], [L2, D], ... one below the other; exact, so a lane may do it without the host."""
        return self.from_host(np.concatenate([self.to_host(part) for part in parts]))

    # --- loss -----------------------------------------------------------------------------------

    @abstractmethod
    def cross_entropy(self, logits: Tensor, targets: Ints, *, name: str) -> tuple[Tensor, Tensor]:
        """Losses [L] and their gradients [L, V], softmax minus one at the target; divided by nothing."""

    @abstractmethod
    def example_sums(self, losses: Tensor, positions: Ints, starts: Ints) -> Tensor:
        """Sums [E] of losses [L] by C128, chunked by position; example e owns starts[e] to starts[e + 1]."""

    # --- adapters -------------------------------------------------------------------------------

    @abstractmethod
    def dropout(
        self, x: Tensor, rate: float, key: DropoutKey, positions: Ints, examples: Ints, *, name: str
    ) -> Tensor:
        """Each element is +0 or x * (1 / (1 - rate)), by its random word; its own backward on dy.

        Args:
            positions: [N] of each row in its example.
            examples: [N] index of each row's example in the whole step, below 2^16.
            x: at most 2^18 columns.
        """

    @abstractmethod
    def embed_backward(
        self, dy: Tensor, token_ids: Ints, starts: Ints, rows: int, *, name: str
    ) -> list[Tensor]:
        """Gradient [rows, D] of a table, one per example: C128 over the positions that took the row."""

    @abstractmethod
    def example_products(self, a: Tensor, b: Tensor, starts: Ints, *, name: str) -> list[Tensor]:
        """a^T b [P, Q], one per example, by C128 over its rows: chunks restart at each example.

        The E gradients are leaves of the step's tree (`mens_core.example_tree`), which sums with `add`.
        """

    def sum_run(self, leaves: Sequence[Tensor], *, name: str) -> Tensor:
        """The aligned tree over 2^n neighbours, by `add`: left + right."""
        if len(leaves) == 1:
            return leaves[0]
        half = len(leaves) // 2
        left, right = (self.sum_run(some, name=name) for some in (leaves[:half], leaves[half:]))
        return self.add(left, right, name=name)

    # --- the update ------------------------------------------------------------------------------

    @abstractmethod
    def sum_of_squares(self, x: Tensor, *, name: str) -> np.float32:
        """C128 of x_i * x_i over the flat tensor."""

    def scale_all(self, tensors: list[Tensor], factor: float, names: Sequence[str]) -> list[Tensor]:
        """`scale` of each; the list is emptied on the way, so that two sets need not be there at once."""
        return [self.scale(tensors.pop(0), factor, name=name) for name in names]

    def adamw_all(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        m: list[Tensor],
        v: list[Tensor],
        by: AdamW,
        names: Sequence[str],
    ) -> None:
        """`adamw` of each."""
        for number, name in enumerate(names):
            self.adamw(parameters[number], gradients[number], m[number], v[number], by, name=name)

    def sums_of_squares(self, tensors: Sequence[Tensor], names: Sequence[str]) -> list[np.float32]:
        """`sum_of_squares` of each; a lane may wait once for all of them."""
        return [self.sum_of_squares(x, name=name) for x, name in zip(tensors, names, strict=True)]

    @abstractmethod
    def adamw(
        self, parameter: Tensor, gradient: Tensor, m: Tensor, v: Tensor, by: AdamW, *, name: str
    ) -> None:
        """Update parameter, m and v in place, element by element."""
