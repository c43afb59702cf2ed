"""What is known of an adapter, wherever it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vox_plugin_api.adapter_keys import adapter_keys
from vox_plugin_api.messages import AdapterConfig, AdapterParams, RankAndAlpha

__all__ = ["AdapterSource"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSource:
    """An adapter that was found, its file hashed, no tensor looked at: the worker does that."""

    folder: Path
    """What was named; its name is the adapter's."""
    origin: Literal["run", "peft", "older"]
    """A run of ours; a folder that PEFT wrote; the older layout."""
    file: Path
    """The safetensors file."""
    sha256: str
    """Of the file."""
    config: AdapterConfig
    """Its targets are whole names of layers; others are its exceptions."""
    key_map: Mapping[str, str]
    """Our key of each tensor (`adapter_keys`) to its key in the file."""
    base_copies: Mapping[str, str] = field(default_factory=dict)
    """The key in the file of what it holds of the base's own weights, by layer."""
    base_name: str | None
    """The base model's name in the store, or what the folder calls it; None: it doesn't say."""
    base_digest: str | None
    """The store's digest of the base model; None: the folder doesn't say."""
    adapter_digest: str | None = None
    """Of the tensors, where it is on record."""
    chat_template: str | None = None
    """The template that the adapter was trained with; None: the base model's."""
    notes: tuple[str, ...] = ()
    """What the user should know although it stops nothing."""

    @property
    def name(self) -> str:
        """What a served model is called: the folder's name."""
        path = self.folder.absolute()
        return path.resolve().name if path.name == ".." else path.name

    @property
    def layers(self) -> dict[str, RankAndAlpha]:
        """Every adapted layer with its rank and alpha, in the bytewise order of their keys."""
        config = self.config
        common = RankAndAlpha(rank=config.rank, alpha=config.alpha)
        names = {*config.targets, *config.exceptions}
        ordered = sorted(names, key=lambda layer: adapter_keys(layer)[0].encode())
        return {layer: config.exceptions.get(layer, common) for layer in ordered}

    def params(self) -> AdapterParams:
        """Return what a worker is told."""
        return AdapterParams(
            file=str(self.file.absolute()),
            digest=self.sha256,
            config=self.config,
            key_map=dict(self.key_map),
            base_copies=dict(self.base_copies),
        )
