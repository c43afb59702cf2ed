"""A loaded model: embedding, layers, head, and the step that runs them.

What a layer is, its family's file says; everything around the layers is alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from mens_core.models.layers import Head
from mens_core.models.linear import Linear, Lora
from mens_core.models.passes import ForwardPass, TrainingPass
from mens_core.models.remembered import Part
from mens_core.ops import Batch, Fault, Ints, KvCache, Ops, Tensor
from mens_core.wishes import Reading, Wish
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
from vox_plugin_api.families.model_config import ModelConfig

__all__ = ["Layer", "Model", "RowFault", "StepResult"]


@dataclass(frozen=True, slots=True)
class RowFault:
    """The first operator whose output for this row of the batch was not finite."""

    row: int
    name: str
    """What was being made, for example "layers.3.self_attn.q_proj"."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """One step's outcome."""

    logits: Tensor | None
    """[L, V], one row per entry of the batch's `logit_rows`; None where none was wanted."""
    faults: tuple[RowFault, ...]
    """At most one per row, ascending. Other rows are not touched by it."""
    readings: tuple[Reading, ...] = ()
    """One per wish, in their order."""


class Layer(Protocol):
    """One decoder layer of a family."""

    def forward(self, run: ForwardPass, x: Tensor) -> Tensor:
        """[N, D] to [N, D]; what later positions need of these rows goes into the cache."""
        ...

    def again(self, run: TrainingPass, x: Tensor) -> None:
        """Run forward once more, as far as `backward` needs it."""
        ...

    def backward(self, run: TrainingPass, dy: Tensor) -> Tensor:
        """The gradient of what `forward` makes to that of its input, in a pass that `again` ran in."""
        ...

    def adapted(self, loras: Mapping[str, Lora]) -> Layer:
        """Return the same layer with these updates, and no others."""
        ...

    def parts(self, longest: int) -> tuple[Part, ...]:
        """What `again` takes over where a pass remembers it, in sequences of up to `longest` rows."""
        ...

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its linear layers."""
        ...


@dataclass(frozen=True, slots=True)
class _Served:
    """A layer in a pass of its own."""

    layer: Layer

    def forward(self, ops: Ops, x: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[N, D] to [N, D]."""
        return self.layer.forward(ForwardPass(ops, batch, cache), x)


@dataclass(frozen=True, slots=True)
class _Step:
    """A model's step; each half is a pass of its own."""

    head: Head
    layers: tuple[_Served, ...]

    def hidden(self, ops: Ops, batch: Batch, cache: KvCache) -> Tensor:
        """The batch's tokens to [N, D]."""
        embedded = self.head.embed(ForwardPass(ops, batch, cache))
        return ops.run_layers(embedded, self.layers, batch, cache)

    def logits(self, ops: Ops, hidden: Tensor, batch: Batch, cache: KvCache) -> Tensor:
        """[L, D] to [L, V]."""
        return self.head.logits(ForwardPass(ops, batch, cache), hidden)

    def greatest(self, ops: Ops, hidden: Tensor, batch: Batch, cache: KvCache) -> Ints | None:
        """[L, D] to the argmax of the logits [L], or None."""
        return self.head.greatest(ForwardPass(ops, batch, cache), hidden)


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder. A step reads and writes the cache; nothing else changes."""

    config: ModelConfig
    ops: Ops
    head: Head
    layers: tuple[Layer, ...]
    _served: tuple[_Served, ...] = field(init=False, repr=False)
    """The layers as `Ops.run_layers` takes them; always the same object, by which a lane knows them."""

    _step: _Step = field(init=False, repr=False)
    """All of it as `Ops.run_step` takes it; likewise."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_served", tuple(_Served(layer) for layer in self.layers))
        object.__setattr__(self, "_step", _Step(self.head, self._served))

    def new_cache(self, blocks: int) -> KvCache:
        """Reserve `blocks` KV blocks of 128 positions for every layer."""
        config = self.config
        return self.ops.new_kv_cache(
            layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, blocks=blocks
        )

    def forward(self, batch: Batch, cache: KvCache, wishes: Sequence[Wish] = ()) -> StepResult:
        """Run one step: prefill, a chunk of one, decode, or any mixture of sequences.

        Args:
            wishes: what is asked of its logits; penalties among them change those of the result.
        """
        if not wishes:
            logits, faults = self.ops.run_step(self._step, batch, cache)
            return StepResult(logits, _first_per_row(faults))
        logits, faults, readings = self.ops.run_and_read(self._step, batch, cache, wishes)
        return StepResult(logits, _first_per_row(faults), tuple(readings))

    def adapted(self, loras: Mapping[str, Lora]) -> Model:
        """Return the same weights with these updates, by the names of their layers, and no others."""
        return replace(
            self,
            head=self.head.adapted(loras),
            layers=tuple(layer.adapted(loras) for layer in self.layers),
        )

    @property
    def layer_shapes(self) -> dict[str, tuple[int, int]]:
        """(outputs, inputs) of every layer that takes an update; the embedding's inputs are its tokens."""
        tokens, width = self.head.embedding.shape
        shapes = {name: linear.shape for name, linear in self.linears.items()}
        return {**shapes, EMBEDDING_LAYER: (width, tokens)}

    @property
    def linears(self) -> dict[str, Linear]:
        """Every linear layer by its name, the output matrix ("lm_head") included."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        return {linear.name: linear for linear in (*linears, self.head.output)}


def _first_per_row(faults: Sequence[Fault]) -> tuple[RowFault, ...]:
    first: dict[int, str] = {}
    for fault in faults:
        for row in fault.rows:
            first.setdefault(row, fault.name)
    return tuple(RowFault(row, first[row]) for row in sorted(first))
