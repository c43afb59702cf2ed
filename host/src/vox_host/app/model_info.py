"""What is served, by which plugin, with which adapter: what callers are told."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from vox_host.counted import counted
from vox_host.errors import IntegrityError, WorkerFailedError
from vox_host.models.installed import InstalledModel
from vox_host.models.model_manifest import MergedFrom
from vox_host.resolution import Resolution
from vox_host.runs.source import AdapterSource
from vox_plugin_api import messages as m

__all__ = ["AdapterInfo", "ModelInfo", "check_adapter", "merged_facts", "model_info"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelInfo:
    """What is served, by which plugin, in which arithmetic."""

    name: str
    digest: str
    """Of the model in the store; with an adapter, of its base."""
    plugin_id: str
    plugin_version: str
    lane: str
    numerics: str
    context_length: int
    """Positions one sequence may use: prompt and answer together."""
    model_context_length: int
    vocab_size: int
    architecture: str = ""
    parameters: int = 0
    created: int = 0
    adapter: AdapterInfo | None = None
    """None: the model as it is."""
    numerics_error: m.NumericsError | None = None
    """How far fast numerics were from canonical ones when the model was loaded; None: they are canonical."""
    merged_from: MergedFrom | None = None
    """The base and the adapter that the model itself was merged of, if it was."""
    degraded: str | None = None
    """Why this is not the lane the machine could have; None where it is."""
    warnings: tuple[str, ...] = ()
    backends: tuple[dict[str, Any], ...] = ()
    """The record of the choice: one entry per candidate and stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterInfo:
    """The adapter that a model is served with."""

    digest: str
    """Of its tensors (docs/numerics.md)."""
    file_digest: str
    """SHA-256 of its file."""
    base: str
    """Name of the model that it lies on."""
    origin: str
    """run, peft or older: whose layout the folder has."""
    rank: int
    """The greatest of its layers'."""
    layers: int
    """How many layers have an update; all that the file has."""
    applied: Literal["unmerged"] = "unmerged"
    """Never folded into the weights."""

    def describe(self) -> str:
        """Return one line for a user."""
        layers = f"{self.layers} of {counted(self.layers, 'layer')}"
        return f"sha256:{self.digest}, rank {self.rank}, {layers} of {self.base} adapted, {self.applied}"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def merged_facts(info: ModelInfo) -> dict[str, Any] | None:
    """Return what is told of a model that was merged; None: it is as its publisher made it."""
    return None if info.merged_from is None else {**info.merged_from.model_dump(), "applied": "merged"}


def numerics_facts(error: m.NumericsError | None) -> dict[str, Any] | None:
    """Return what is told of how far numerics are from canonical ones; None: there is nothing to tell."""
    return None if error is None else error.model_dump()


def describe_numerics(numerics: str, error: m.NumericsError | None) -> str:
    """Return words for a user: "canonical", or how far from it."""
    if error is None:
        return f"{numerics} numerics"
    return (
        f"{numerics} numerics (beside canonical, on {error.positions} positions: logits off by at most "
        f"{error.max_logit_difference:.3g}, KL {error.mean_kl:.2e}, {error.equal_argmax:.1%} the same token)"
    )


def check_adapter(source: AdapterSource, loaded: m.LoadResult, plugin_id: str) -> None:
    """Refuse a load that did not apply the adapter, or another one.

    Raises:
        WorkerFailedError: the worker says nothing of an adapter.
        IntegrityError: its tensors are not those on record.
    """
    if loaded.adapter_digest is None:
        raise WorkerFailedError(
            "adapter-ignored",
            f'plugin "{plugin_id}" loaded the model without the adapter {source.folder}; it is not served',
            facts=[("expected", "an adapter_digest in the load's result"), ("found", "none")],
            remedy="Use a plugin that serves adapters, or a newer version of this one.",
        )
    if source.adapter_digest is not None and loaded.adapter_digest != source.adapter_digest:
        raise IntegrityError(
            "adapter-digest",
            f"the tensors that were loaded are not the adapter {source.folder}; it is not served",
            facts=[
                ("expected", f"sha256:{source.adapter_digest}"),
                ("found", f"sha256:{loaded.adapter_digest}"),
            ],
            remedy="Check the plugin: `vox-host plugin check`.",
        )


def _adapter_info(source: AdapterSource, base: InstalledModel, loaded: m.LoadResult) -> AdapterInfo:
    """Return what callers are told."""
    return AdapterInfo(
        digest=loaded.adapter_digest or "",
        file_digest=source.sha256,
        base=base.name,
        origin=source.origin,
        rank=max(by.rank for by in source.layers.values()),
        layers=len(source.layers),
    )


def model_info(
    model: InstalledModel,
    adapter: AdapterSource | None,
    resolution: Resolution,
    load: m.LoadResult,
    template_warnings: Sequence[str],
) -> ModelInfo:
    """Return what callers are told of a model that was loaded."""
    chosen = resolution.chosen
    notes = () if adapter is None else adapter.notes
    return ModelInfo(
        name=model.name if adapter is None else adapter.name,
        adapter=None if adapter is None else _adapter_info(adapter, model, load),
        digest=model.digest,
        merged_from=model.merged_from,
        plugin_id=chosen.plugin_id,
        plugin_version=chosen.version or "",
        lane=chosen.described_lane,
        numerics=load.numerics,
        numerics_error=load.numerics_error,
        context_length=load.context_length,
        model_context_length=load.model_context_length,
        vocab_size=load.vocab_size,
        architecture=load.architecture,
        parameters=load.parameters,
        created=_unix_time(model.imported_at),
        degraded=resolution.degraded_reason,
        warnings=(*resolution.warnings, *notes, *load.warnings, *template_warnings),
        backends=tuple(record.as_dict() for record in resolution.records),
    )


def _unix_time(iso: str) -> int:
    try:
        moment = datetime.datetime.fromisoformat(iso)
    except ValueError:
        return 0
    return int(moment.replace(tzinfo=moment.tzinfo or datetime.UTC).timestamp())
