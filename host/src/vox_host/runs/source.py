"""What is known of an adapter, wherever it came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vox_plugin_api.messages import AdapterConfig, AdapterParams

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
    """Its targets are whole names of the adapted layers."""
    key_map: Mapping[str, str]
    """Our key of each tensor (`adapter_keys`) to its key in the file."""
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

    def params(self) -> AdapterParams:
        """Return what a worker is told."""
        return AdapterParams(
            file=str(self.file.absolute()),
            digest=self.sha256,
            config=self.config,
            key_map=dict(self.key_map),
        )
