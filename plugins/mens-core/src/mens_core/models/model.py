"""A loaded model: embedding, layers, head, and the step that runs them.

What a layer is, its family's file says; everything around the layers is alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mens_core.config import ModelConfig
from mens_core.models.layers import Head
from mens_core.ops import Batch, Fault, KvCache, Layer, Ops, Tensor

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


@dataclass(frozen=True, slots=True)
class Model:
    """A decoder. A step reads and writes the cache; nothing else changes."""

    config: ModelConfig
    ops: Ops
    head: Head
    layers: tuple[Layer, ...]

    def new_cache(self, blocks: int) -> KvCache:
        """Reserve `blocks` KV blocks of 128 positions for every layer."""
        config = self.config
        return self.ops.new_kv_cache(
            layers=config.layers, kv_heads=config.kv_heads, head_dim=config.head_dim, blocks=blocks
        )

    def forward(self, batch: Batch, cache: KvCache) -> StepResult:
        """Run one step: prefill, a chunk of one, decode, or any mixture of sequences."""
        hidden = self.head.embed(self.ops, batch)
        hidden = self.ops.run_layers(hidden, self.layers, batch, cache)
        faults = list(self.ops.take_faults())
        logits = None
        if len(batch.logit_rows):
            logits = self.head.logits(self.ops, self.ops.take_rows(hidden, batch.logit_rows))
            # From here on a lane numbers the rows that were taken.
            for fault in self.ops.take_faults():
                rows = tuple(int(batch.logit_rows[row]) for row in fault.rows)
                faults.append(Fault(fault.name, rows))
        return StepResult(logits, _first_per_row(faults))


def _first_per_row(faults: Sequence[Fault]) -> tuple[RowFault, ...]:
    first: dict[int, str] = {}
    for fault in faults:
        for row in fault.rows:
            first.setdefault(row, fault.name)
    return tuple(RowFault(row, first[row]) for row in sorted(first))
