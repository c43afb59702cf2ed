"""An adapter to serve a model with: its file read and held against the model, before a weight is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mens_core.adapters.file import read_tensors
from mens_core.adapters.keys import adapter_digest
from mens_core.adapters.plan import LARGEST, AdapterPlan, plan_adapter
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
from vox_plugin_api.backend import BackendError
from vox_plugin_api.families import ModelConfig, adapted_shapes
from vox_plugin_api.families.tensors import HEAD
from vox_plugin_api.messages import AdapterParams

__all__ = ["ServedAdapter", "layer_shapes", "read_adapter"]

_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter that fits the model; its values are on the host."""

    plan: AdapterPlan
    tensors: Mapping[str, npt.NDArray[np.float32]]
    """By our keys."""
    digest: str
    """Of the tensors (docs/numerics.md)."""
    file: Path
    copies: Mapping[str, str]
    """Keys in the file of what it holds of the base's own weights, by layer (`copies`)."""
    warnings: tuple[str, ...]


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every layer that takes an update, as `Model.layer_shapes` has them."""
    return adapted_shapes(config)


def read_adapter(params: AdapterParams, config: ModelConfig) -> ServedAdapter:
    """Read the file, every tensor to its place.

    Raises:
        BackendError: `adapter-unreadable`, `adapter-digest`: the file is not there, or not the one that
            was named; `adapter-target`; `adapter-scale`, also of an update that is too large;
            `adapter-tensors`: a tensor is missing, has no place, another shape or format, or isn't finite.
    """
    path = Path(params.file)
    _check_digest(path, params.digest)
    plan = plan_adapter(params.config, layer_shapes(config), is_served=True)
    table = (config.vocab_size, config.hidden_size)
    unknown = sorted(set(params.base_copies) - {EMBEDDING_LAYER, HEAD.removesuffix(".weight")})
    if unknown:
        raise BackendError(
            "adapter-tensors",
            f"{path} is said to hold copies of {', '.join(unknown[:5])}; those of embed_tokens and lm_head "
            "are compared, no others, and nothing was taken from it",
            facts={"file": str(path), "orphans": unknown[:100]},
        )
    others = dict.fromkeys(params.base_copies.values(), table)
    try:
        tensors = read_tensors(path, plan.shapes, key_map=params.key_map, dtypes=_DTYPES, others=others)
    except BackendError as error:
        raise _with_rank(error, params, path) from error
    _refuse_too_large(path, plan, tensors)
    warnings = []
    # That alpha is 0 is said by whoever read the configuration.
    has_scale = any(matrix.scale for matrix in plan.matrices)
    if has_scale and not any(all(tensors[key].any() for key in matrix.keys) for matrix in plan.matrices):
        warnings.append("every update of the adapter is zero: it changes nothing, as before its first step")
    return ServedAdapter(
        plan, tensors, adapter_digest(tensors), path, dict(params.base_copies), tuple(warnings)
    )


def _refuse_too_large(path: Path, plan: AdapterPlan, tensors: Mapping[str, npt.NDArray[np.float32]]) -> None:
    """Refuse an update after which no answer would be finite: at generation it would be named late."""
    for matrix in plan.matrices:
        a, b = (float(np.abs(tensors[key]).max(initial=0)) for key in matrix.keys)
        # What an input of 1 may become; norms square it, and nothing squares a logit.
        if matrix.scale * a * b >= LARGEST and matrix.name != HEAD.removesuffix(".weight"):
            raise BackendError(
                "adapter-scale",
                f"{path} has an update of {matrix.name} of up to {matrix.scale * a * b:.3g} for an input of "
                "1, whose square float32 doesn't hold: no answer would be finite. Nothing was loaded",
                facts={"file": str(path), "layer": matrix.name, "scale": matrix.scale},
                remedy="Take alpha and rank from where the adapter was trained.",
            )


def _check_digest(path: Path, expected: str) -> None:
    try:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BackendError(
            "adapter-unreadable",
            f"the adapter {path} cannot be read: {error.strerror or error}; nothing was loaded",
            facts={"file": str(path)},
        ) from error
    if found != expected:
        raise BackendError(
            "adapter-digest",
            f"the adapter {path} is not the file that was named; nothing was loaded",
            facts={"file": str(path), "expected": f"sha256:{expected}", "found": f"sha256:{found}"},
            remedy="Open the adapter again.",
        )


def _with_rank(error: BackendError, params: AdapterParams, path: Path) -> BackendError:
    """Say it in one line where all that doesn't fit is the rank."""
    wrong = error.error.facts.get("wrong", [])
    ranks = {line.split("[")[1].split(",")[0] for line in wrong if "lora_A" in line}
    facts = error.error.facts
    # The facts name a hundred at most.
    if len(ranks) != 1 or len(wrong) < min(100, len(params.key_map)) or facts["missing"] or facts["orphans"]:
        return error
    (rank,) = ranks
    return BackendError(
        "adapter-tensors",
        f"{path} does not fit its configuration: config r={params.config.rank}, tensors r={rank}. Nothing "
        "was taken from it",
        facts=facts,
        remedy="Take adapter and configuration from the same training.",
    )
