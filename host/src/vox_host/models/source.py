"""What a model can be imported from, and what each such source tells before anything is written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vox_host.errors import ModelError
from vox_host.models.model_manifest import MergedFrom
from vox_host.models.safetensors_write import Progress
from vox_plugin_api.checkpoint import CheckpointError

__all__ = ["Contents", "License", "Source", "as_model_error"]


@dataclass(frozen=True, slots=True)
class License:
    """Under what terms a model's publisher gives it away."""

    id: str
    """As the files state it ("gemma", "apache-2.0"), or "unknown"."""
    terms: str
    """Where the terms can be read, or that the files don't say."""


@dataclass(frozen=True, slots=True)
class Contents:
    """What a source wrote into a model directory."""

    architecture: str
    digests: dict[str, str] = field(default_factory=dict)
    """SHA-256 by file name."""
    merged_from: MergedFrom | None = None
    """What the model was merged of, if it was."""


class Source(Protocol):
    """A model somewhere else, opened and checked."""

    default_name: str
    license: License
    notes: tuple[str, ...]
    """What the user should know although it stops nothing: a family that nobody here knows, defaults taken,
    tensors left unused."""

    def needed_bytes(self) -> int:
        """Return how much disk space `write` needs at its worst moment."""

    def identity(self, progress: Progress) -> dict[str, Any]:
        """Return what the model's manifest records about its origin; `sha256` is equal for equal bytes."""

    def write(self, target: Path, scratch: Path, progress: Progress) -> Contents:
        """Write every file of the model into the empty directory `target`, each flushed.

        `scratch` is an empty directory on the same disk that is deleted afterwards.
        """


def as_model_error(error: CheckpointError) -> ModelError:
    """Return the host's error for a malformed checkpoint."""
    return ModelError(
        error.code,
        f"{error.message}; nothing was imported",
        facts=list(error.facts.items()),
        remedy=error.remedy,
    )
