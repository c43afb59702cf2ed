"""How a model's parts run: what a forward pass does around the operators, in service and training.

The parts of a model (`layers`) are written once and say what they compute. A pass supplies the
batch and the cache, puts adapters on layers and, in training, keeps what the backward
needs. `ForwardPass` serves; `TrainingPass` runs the same operators on the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from mens_core.models.linear import Embedding, Linear, Lora
from mens_core.models.remembered import Remembered
from mens_core.ops import AttentionSpec, Batch, Ints, KvCache, Ops, Tensor
from mens_core.training_ops import AttentionSaved, DropoutKey, TrainingOps

__all__ = ["Dropout", "ExampleRows", "ForwardPass", "TrainingPass"]


class ForwardPass:
    """A pass over one batch: every layer's keys and values go into `cache`."""

    __slots__ = ("batch", "cache", "ops")

    def __init__(self, ops: Ops, batch: Batch, cache: KvCache) -> None:
        self.ops = ops
        self.batch = batch
        self.cache = cache

    def embed(self, embedding: Embedding) -> Tensor:
        """The batch's token ids to [N, D], with the update; the scale multiplies both."""
        ops, ids, name, lora = self.ops, self.batch.token_ids, embedding.name, embedding.lora
        if lora is None or lora.is_zero:
            return ops.embed(embedding.weight, ids, embedding.scale, name=name)
        adapting = cast(TrainingOps, ops)
        row = ops.embed(embedding.weight, ids, None, name=name)
        u = ops.embed(lora.a, ids, None, name=f"{name}.lora_A")
        v = ops.linear(u, lora.b, name=f"{name}.lora_B")
        row = adapting.add_scaled(row, v, lora.scale, name=f"{name}.adapted")
        return row if embedding.scale is None else adapting.scale(row, embedding.scale, name=f"{name}.scaled")

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        """[N, columns] to [N, rows], with the layer's update."""
        y = self.ops.linear(x, linear.weight, name=linear.name)
        return y if linear.lora is None else self._updated(linear, x, y)

    def linears(self, linears: Sequence[Linear], x: Tensor) -> list[Tensor]:
        """Several layers of one input."""
        made = self.ops.linear_many(
            x, [linear.weight for linear in linears], names=[linear.name for linear in linears]
        )
        return self._all_updated(linears, x, made)

    def kv_append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store the rows' keys and values."""
        self.ops.kv_append(self.cache, layer, k, v, self.batch)

    def attention(self, q: Tensor, layer: int, spec: AttentionSpec, name: str) -> Tensor:
        """Attend to what is stored: [N, H * C]."""
        return self.ops.attention(q, self.cache, layer, self.batch, spec, name=name)

    def keep(self, name: str, *tensors: Tensor) -> None:
        """Note what a backward pass would need: nothing here."""

    def _all_updated(self, linears: Sequence[Linear], x: Tensor, made: Sequence[Tensor]) -> list[Tensor]:
        """The outputs of layers of one input, with their updates.

        Part by part: what doesn't wait for one another then stands together, for a lane that runs it at once.
        """
        ops = cast(TrainingOps, self.ops)
        loras = {i: lora for i, linear in enumerate(linears) if (lora := linear.lora) and not lora.is_zero}
        names = [linear.name for linear in linears]
        u = {i: ops.linear(x, lora.a, name=f"{names[i]}.lora_A") for i, lora in loras.items()}
        v = {i: ops.linear(u[i], lora.b, name=f"{names[i]}.lora_B") for i, lora in loras.items()}
        return [
            ops.add_scaled(y, v[i], loras[i].scale, name=f"{names[i]}.adapted") if i in loras else y
            for i, y in enumerate(made)
        ]

    def _updated(self, linear: Linear, x: Tensor, y: Tensor) -> Tensor:
        lora, ops = linear.lora, cast(TrainingOps, self.ops)
        if lora is None or lora.is_zero:
            return y
        u = ops.linear(x, lora.a, name=f"{linear.name}.lora_A")
        v = ops.linear(u, lora.b, name=f"{linear.name}.lora_B")
        return ops.add_scaled(y, v, lora.scale, name=f"{linear.name}.adapted")


@dataclass(frozen=True, slots=True)
class ExampleRows:
    """Whose rows a pass runs over: example e owns starts[e] to starts[e + 1]."""

    positions: Ints
    """[N] in their example."""
    examples: Ints
    """[N] index of each row's example in the whole step."""
    starts: Ints
    """[E + 1]"""


@dataclass(frozen=True, slots=True)
class Dropout:
    """On the inputs of adapters, in one step of training."""

    rate: float
    seed: int
    step: int


Gradient = Callable[[str, list[Tensor]], None]
"""Takes a parameter's name and its gradient for each example of the pass."""


class TrainingPass(ForwardPass):
    """A pass over whole examples, in a cache of one layer that each layer takes over.

    The first pass over a layer makes the next one's input. The second is given a `gradient`:
    it keeps what the backward needs, which follows at once. What the first one `remembered` it takes over.
    """

    __slots__ = ("_dropout", "_gradient", "_kept", "_remembered", "_rows")

    ops: TrainingOps

    def __init__(
        self,
        ops: TrainingOps,
        batch: Batch,
        cache: KvCache,
        rows: ExampleRows,
        *,
        dropout: Dropout | None = None,
        gradient: Gradient | None = None,
        remembered: Remembered | None = None,
    ) -> None:
        """`gradient` takes what the backward makes; without one, nothing is kept for it.

        Args:
            remembered: of the layer that runs: written by the first pass, read by the second.
        """
        super().__init__(ops, batch, cache)
        self._rows = rows
        self._dropout = dropout
        self._gradient = gradient
        self._remembered = remembered or Remembered(frozenset())
        self._kept: dict[str, tuple[Any, ...]] = {}

    def kv_append(self, layer: int, k: Tensor, v: Tensor) -> None:
        super().kv_append(0, k, v)

    def attention(self, q: Tensor, layer: int, spec: AttentionSpec, name: str) -> Tensor:
        remembered = self._remembered
        saved: AttentionSaved | None = remembered.recall(name)
        if saved is None:
            if self._gradient is None and not remembered.wants(name):
                return super().attention(q, 0, spec, name)
            saved = self.ops.attention_saving(q, self.cache, 0, self.batch, spec, name=name)
            remembered.note(name, saved)
        self.keep(name, q, saved)
        return saved.out

    def linear(self, linear: Linear, x: Tensor) -> Tensor:
        y = self._remembered.recall(linear.name)
        if y is None:
            y = super().linear(linear, x)
            self._remembered.note(linear.name, y)
        else:
            self.keep_input(linear, x)
        return y

    def linears(self, linears: Sequence[Linear], x: Tensor) -> list[Tensor]:
        if any(self._remembered.recall(linear.name) is not None for linear in linears):
            return [self.linear(linear, x) for linear in linears]
        made = super().linears(linears, x)
        for linear, y in zip(linears, made, strict=True):
            self._remembered.note(linear.name, y)
        return made

    def keep(self, name: str, *tensors: Tensor) -> None:
        """Keep tensors under the name of what was made with them."""
        if self._gradient is not None:
            self._kept[name] = tensors

    def keep_input(self, linear: Linear, x: Tensor) -> None:
        """Keep what the backward of a layer needs whose output is known, or isn't needed."""
        if self._gradient is not None and linear.lora is not None:
            self._reduced(linear, linear.lora, x)

    def kept(self, name: str) -> tuple[Any, ...]:
        """Return what `keep` was given."""
        return self._kept[name]

    def _all_updated(self, linears: Sequence[Linear], x: Tensor, made: Sequence[Tensor]) -> list[Tensor]:
        return [
            y if linear.lora is None else self._updated(linear, x, y)
            for linear, y in zip(linears, made, strict=True)
        ]

    def _updated(self, linear: Linear, x: Tensor, y: Tensor) -> Tensor:
        lora, ops, name = linear.lora, self.ops, linear.name
        if lora is None:
            return y
        if self._gradient is None and lora.is_zero:
            return y
        u = self._reduced(linear, lora, x)
        if lora.is_zero:
            return y
        return ops.add_product(y, u, lora.b, lora.scale, product=f"{name}.lora_B", name=f"{name}.adapted")

    def _reduced(self, linear: Linear, lora: Lora, x: Tensor) -> Tensor:
        """x A^T with what is dropped of x, kept for the backward."""
        name = linear.name
        u = self._remembered.recall(f"{name}.lora_A")
        if u is None or self._gradient is not None:
            x = self._dropped(x, linear, f"{name}.dropout")
        if u is None:
            u = self.ops.linear(x, lora.a, name=f"{name}.lora_A")
            self._remembered.note(f"{name}.lora_A", u, of=name)
        self.keep(name, x, u)
        return u

    def _dropped(self, x: Tensor, linear: Linear, name: str) -> Tensor:
        if self._dropout is None or linear.lora is None:
            return x
        key = DropoutKey(self._dropout.seed, self._dropout.step, linear.lora.number)
        rows = self._rows
        return self.ops.dropout(x, self._dropout.rate, key, rows.positions, rows.examples, name=name)

    # --- backward ------------------------------------------------------------------------------

    def linear_backward(self, linear: Linear, dy: Tensor) -> Tensor:
        """Gradient of the layer's input; those of its update are given away: [N, columns]."""
        ops, name, lora = self.ops, linear.name, linear.lora
        dx = ops.linear_backward(dy, linear.weight, name=f"{name}.backward")
        if lora is None:
            return dx
        x, u = self.kept(name)
        starts = self._rows.starts
        dv = ops.scale(dy, lora.scale, name=f"{name}.lora_B.backward")
        du = ops.linear_backward(dv, lora.b, name=f"{name}.lora_A.backward")
        self._give(f"{name}.lora_A", ops.example_products(du, x, starts, name=f"{name}.lora_A.gradient"))
        self._give(f"{name}.lora_B", ops.example_products(dv, u, starts, name=f"{name}.lora_B.gradient"))
        product, adapted = f"{name}.dropout.backward", f"{name}.adapted.backward"
        if self._dropout is None:
            return ops.add_product_backward(dx, du, lora.a, product=product, name=adapted)
        update = ops.linear_backward(du, lora.a, name=product)
        return ops.add(dx, self._dropped(update, linear, product), name=adapted)

    def linears_backward(self, linears: Sequence[Linear], dys: Sequence[Tensor]) -> Tensor:
        """Gradient of the input that several layers share, summed in their order."""
        total, *others = [self.linear_backward(linear, dy) for linear, dy in zip(linears, dys, strict=True)]
        for linear, dx in zip(linears[1:], others, strict=True):
            total = self.ops.add(total, dx, name=f"{linear.name}.sum.backward")
        return total

    def embed_backward(self, embedding: Embedding, dy: Tensor) -> None:
        """Give away the gradients of the embedding's update, if there is one; dy: [N, D].

        Nothing is kept for it: all that it needs of the forward are rows of A, looked up again.
        """
        ops, name, lora = self.ops, embedding.name, embedding.lora
        if lora is None:
            return
        ids, starts = self.batch.token_ids, self._rows.starts
        if embedding.scale is not None:
            dy = ops.scale(dy, embedding.scale, name=f"{name}.scaled.backward")
        dv = ops.scale(dy, lora.scale, name=f"{name}.lora_B.backward")
        du = ops.linear_backward(dv, lora.b, name=f"{name}.lora_A.backward")
        u = ops.embed(lora.a, ids, None, name=f"{name}.lora_A")
        tokens, _ = embedding.shape
        self._give(
            f"{name}.lora_A", ops.embed_backward(du, ids, starts, tokens, name=f"{name}.lora_A.gradient")
        )
        self._give(f"{name}.lora_B", ops.example_products(dv, u, starts, name=f"{name}.lora_B.gradient"))

    def attention_backward(self, dy: Tensor, spec: AttentionSpec, name: str) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        q, saved = cast(tuple[Tensor, AttentionSaved], self.kept(name))
        return self.ops.attention_backward(
            dy, q, saved, self.cache, 0, self.batch, spec, name=f"{name}.backward"
        )

    def _give(self, name: str, gradients: list[Tensor]) -> None:
        if self._gradient is None:
            raise AssertionError("a pass that kept nothing has no backward")
        self._gradient(name, gradients)
