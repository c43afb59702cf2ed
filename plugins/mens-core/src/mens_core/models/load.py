"""Make a `Model` of a model directory.

The only place that knows which family's layer a config asks for. Loading is a generator, so
that a worker can answer its host between two layers.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Protocol

from mens_core.inv_freq import compare_inv_freq
from mens_core.models import gemma3, qwen3
from mens_core.models.layers import Head, rotary_tables
from mens_core.models.model import Layer, Model
from mens_core.ops import Ops, RotaryTable
from mens_core.weights import Weights
from vox_plugin_api.checkpoint import Checkpoint
from vox_plugin_api.families.model_config import Family, ModelConfig
from vox_plugin_api.families.tensors import TensorPlan, plan_tensors, stored_tensors

__all__ = ["LoadedModel", "Progress", "load", "load_all"]


class _LayerFamily(Protocol):
    def load(self, config: ModelConfig, weights: Weights, layer: int, rotary: RotaryTable) -> Layer: ...


_LAYERS: Mapping[Family, _LayerFamily] = {"qwen3": qwen3.Layer, "gemma3": gemma3.Layer}


@dataclass(frozen=True, slots=True)
class Progress:
    """Layers loaded so far, of all."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what the load report says about it."""

    model: Model
    plan: TensorPlan
    notes: tuple[str, ...]
    """Defaults taken, tensors not used, frequencies compared: for the user to read."""


def load(config: ModelConfig, checkpoint: Checkpoint, ops: Ops) -> Generator[Progress, None, LoadedModel]:
    """Load every weight, yielding after each layer.

    Raises:
        CheckpointError: the weights don't fit the config (see `plan_tensors`); nothing was loaded.
    """
    plan = plan_tensors(config, stored_tensors(checkpoint), source=str(checkpoint.path))
    notes = (*config.notes, *plan.notes, *compare_inv_freq(config, checkpoint))
    weights = Weights(config, plan, checkpoint, ops)
    tables = rotary_tables(config, ops)
    head = Head.load(config, weights)
    layers = []
    family = _LAYERS[config.family]
    for i, kind in enumerate(config.attention_kinds):
        yield Progress(i, config.layers)
        layers.append(family.load(config, weights, i, tables[kind]))
    return LoadedModel(Model(config, ops, head, tuple(layers)), plan, notes)


def load_all(config: ModelConfig, checkpoint: Checkpoint, ops: Ops) -> LoadedModel:
    """`load` in one go, for callers that nobody waits on."""
    steps = load(config, checkpoint, ops)
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            loaded: LoadedModel = stop.value
            return loaded
