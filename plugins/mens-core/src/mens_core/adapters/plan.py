"""Which layers an adapter lies on: a configuration held against a model. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from mens_core.adapters.keys import parameter_key
from mens_core.float32 import exact, nearest, nearest_root
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import AdapterConfig, RankAndAlpha

__all__ = ["LARGEST", "AdaptedMatrix", "AdapterPlan", "plan_adapter"]

_MOST_MATRICES = 1 << 16
LARGEST = 2.0**64
"""Of a number from here on the square is not finite."""


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A layer that gets an update."""

    name: str
    """Of the layer: "layers.0.self_attn.q_proj"."""
    number: int
    """Its place in the bytewise order of the adapter's keys."""
    rows: int
    """Outputs; of the embedding, its width."""
    columns: int
    """Inputs; of the embedding, its tokens."""
    rank: int
    scale: float
    """A float32 value; 0 where alpha is, which `plan_adapter` takes of an adapter that is served only."""

    @property
    def is_embedding(self) -> bool:
        """Whether its A is looked up by token instead of multiplied."""
        return self.name == EMBEDDING_LAYER

    @property
    def keys(self) -> tuple[str, str]:
        """The keys of its A [rank, columns] and its B [rows, rank]."""
        return parameter_key(f"{self.name}.lora_A"), parameter_key(f"{self.name}.lora_B")


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter of one model, without its values."""

    config: AdapterConfig
    matrices: tuple[AdaptedMatrix, ...]
    """By number."""
    dropout: float
    """A float32 value."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of every tensor by its key, keys in bytewise order."""
        shapes = {}
        for matrix in self.matrices:
            key_a, key_b = matrix.keys
            shapes[key_a] = (matrix.rank, matrix.columns)
            shapes[key_b] = (matrix.rows, matrix.rank)
        return dict(sorted(shapes.items(), key=lambda item: item[0].encode()))

    @property
    def parameters(self) -> int:
        """Numbers in all its tensors."""
        return sum(rows * columns for rows, columns in self.shapes.values())


def plan_adapter(
    config: AdapterConfig, layers: Mapping[str, tuple[int, int]], *, is_served: bool = False
) -> AdapterPlan:
    """Find the layers that the targets name.

    Args:
        layers: (outputs, inputs) of every layer of the model that may be adapted, by name.
        is_served: it is not to be trained, so alpha may be 0: such an adapter changes nothing.

    Raises:
        BackendError: `adapter-target`: a target or an exception names no layer; `adapter-scale`: an
            alpha and its rank give a factor that float32 doesn't hold, or not its square. Nothing was begun.
    """
    chosen: set[str] = set()
    for target in config.targets:
        found = [name for name in layers if name == target or name.endswith(f".{target}")]
        if not found:
            raise _no_such_target(target, layers)
        chosen.update(found)
    for name in config.exceptions:
        if name not in layers:
            raise _no_such_target(name, layers)
        chosen.add(name)
    names = sorted(chosen, key=lambda name: parameter_key(f"{name}.lora_A").encode())
    if len(names) > _MOST_MATRICES:
        raise BackendError(
            "adapter-target",
            f"an adapter may lie on {_MOST_MATRICES} matrices; {len(names)} were named and nothing was done",
            facts={"matrices": len(names), "limit": _MOST_MATRICES},
        )
    common = RankAndAlpha(rank=config.rank, alpha=config.alpha)
    matrices = []
    for number, name in enumerate(names):
        by = config.exceptions.get(name, common)
        scale = 0.0 if is_served and by.alpha == 0 else _scale(name, by, config.rank_stabilised)
        matrices.append(AdaptedMatrix(name, number, *layers[name], by.rank, scale))
    return AdapterPlan(config, tuple(matrices), float(exact(config.dropout)))


def _scale(name: str, by: RankAndAlpha, rank_stabilised: bool) -> float:
    alpha = exact(by.alpha)
    try:
        scale = nearest_root(alpha * alpha / by.rank) if rank_stabilised else nearest(alpha / by.rank)
    except OverflowError:
        scale = 0.0
    if scale == 0 or scale >= LARGEST:
        held = "a factor that float32 doesn't hold"
        if scale:
            held = f"a factor of {scale:.3g}, whose square float32 doesn't hold: neither norms nor gradients"
        raise BackendError(
            "adapter-scale",
            f"alpha {by.alpha} with rank {by.rank} ({name}) gives {held}; nothing was done",
            facts={"layer": name, "alpha": by.alpha, "rank": by.rank},
            remedy="Choose an alpha near the rank.",
        )
    return scale


def _no_such_target(target: str, layers: Mapping[str, tuple[int, int]]) -> BackendError:
    known = sorted({name.rpartition(".")[2] for name in layers})
    near = difflib.get_close_matches(target, [*known, *layers], n=1)
    hint = f" (there is {near[0]!r})" if near else ""
    whole = next((name for name in layers if "." in name), target)
    return BackendError(
        "adapter-target",
        f"no layer of this model that takes an update is called {target!r}{hint}; nothing was done",
        facts={"target": target, "known": known},
        remedy=f"Targets are {', '.join(known)}, or whole names such as {whole!r}.",
    )
