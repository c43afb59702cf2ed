"""Which linear layers an adapter lies on: a configuration held against a model. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from mens_core.adapters.keys import parameter_key
from mens_core.float32 import exact, nearest, nearest_root
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import AdapterConfig

__all__ = ["AdaptedMatrix", "AdapterPlan", "plan_adapter"]

_MOST_MATRICES = 1 << 16


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """A linear layer that gets an update."""

    name: str
    """Of the layer: "layers.0.self_attn.q_proj"."""
    number: int
    """Its place in the bytewise order of the adapter's keys."""
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """An adapter of one model, without its values."""

    config: AdapterConfig
    matrices: tuple[AdaptedMatrix, ...]
    """By number."""
    scale: float
    """A float32 value; 0 where alpha is, which `plan_adapter` takes of an adapter that is served only."""
    dropout: float
    """A float32 value."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """The shape of every tensor by its key, keys in bytewise order."""
        rank = self.config.rank
        shapes = {}
        for matrix in self.matrices:
            shapes[parameter_key(f"{matrix.name}.lora_A")] = (rank, matrix.columns)
            shapes[parameter_key(f"{matrix.name}.lora_B")] = (matrix.rows, rank)
        return dict(sorted(shapes.items(), key=lambda item: item[0].encode()))

    @property
    def parameters(self) -> int:
        """Numbers in all its tensors."""
        return sum(rows * columns for rows, columns in self.shapes.values())


def plan_adapter(
    config: AdapterConfig, linears: Mapping[str, tuple[int, int]], *, is_served: bool = False
) -> AdapterPlan:
    """Find the layers that the targets name.

    Args:
        linears: (rows, columns) of every linear layer of the model, by name.
        is_served: it is not to be trained, so alpha may be 0: such an adapter changes nothing.

    Raises:
        BackendError: `adapter-target`: a target names no layer; `adapter-scale`: alpha and rank
            give a factor that float32 doesn't hold. Nothing was begun.
    """
    chosen: set[str] = set()
    for target in config.targets:
        found = [name for name in linears if name == target or name.endswith(f".{target}")]
        if not found:
            raise _no_such_target(target, linears)
        chosen.update(found)
    names = sorted(chosen, key=lambda name: parameter_key(f"{name}.lora_A").encode())
    if len(names) > _MOST_MATRICES:
        raise BackendError(
            "adapter-target",
            f"an adapter may lie on {_MOST_MATRICES} matrices; {len(names)} were named and nothing was done",
            facts={"matrices": len(names), "limit": _MOST_MATRICES},
        )
    scale = 0.0 if is_served and config.alpha == 0 else _scale(config)
    matrices = tuple(AdaptedMatrix(name, number, *linears[name]) for number, name in enumerate(names))
    return AdapterPlan(config, matrices, scale, float(exact(config.dropout)))


def _scale(config: AdapterConfig) -> float:
    alpha = exact(config.alpha)
    try:
        if config.rank_stabilised:
            scale = nearest_root(alpha * alpha / config.rank)
        else:
            scale = nearest(alpha / config.rank)
    except OverflowError:
        scale = 0.0
    if scale == 0:
        raise BackendError(
            "adapter-scale",
            f"alpha {config.alpha} with rank {config.rank} gives a factor that float32 doesn't hold; "
            "nothing was done",
            facts={"alpha": config.alpha, "rank": config.rank},
            remedy="Choose an alpha near the rank.",
        )
    return scale


def _no_such_target(target: str, linears: Mapping[str, tuple[int, int]]) -> BackendError:
    known = sorted({name.rpartition(".")[2] for name in linears})
    near = difflib.get_close_matches(target, [*known, *linears], n=1)
    hint = f" (there is {near[0]!r})" if near else ""
    return BackendError(
        "adapter-target",
        f"no linear layer of this model is called {target!r}{hint}; nothing was done",
        facts={"target": target, "known": known},
        remedy=f"Targets are {', '.join(known)}, or whole names such as {next(iter(linears))!r}."
        + (" Of tied embeddings, lm_head is the head alone." if target == "embed_tokens" else ""),
    )
