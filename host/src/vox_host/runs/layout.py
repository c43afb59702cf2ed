"""The names of a run's files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_MANIFEST",
    "ADAPTER_MODEL",
    "BESIDE",
    "CHAT_TEMPLATE",
    "CHECKPOINTS",
    "CHECKPOINT_ADAPTER",
    "CONFIG",
    "PUBLISHED",
    "RUN_JSON",
    "TOKENIZER",
    "RunDirectory",
]

ADAPTER_MODEL = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_MANIFEST = "adapter_manifest.json"
RUN_JSON = "run.json"
TOKENIZER = "tokenizer.json"
CONFIG = "config.json"
CHAT_TEMPLATE = "chat_template.jinja"

BESIDE = (TOKENIZER, CONFIG, CHAT_TEMPLATE)
"""Files that the adapter was trained with; the manifest binds those that are there."""

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""

CHECKPOINT_ADAPTER = "adapter.safetensors"
"""The adapter in a folder that a worker's `train_save` wrote."""

PUBLISHED = ".published"
"""A folder that is there only while its files are brought into place: then it is the adapter."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of one run; nothing is touched."""

    path: Path

    @property
    def run_json(self) -> Path:
        """What the run is; written once, at its start."""
        return self.path / RUN_JSON

    @property
    def adapter_model(self) -> Path:
        return self.path / ADAPTER_MODEL

    @property
    def adapter_config(self) -> Path:
        return self.path / ADAPTER_CONFIG

    @property
    def adapter_manifest(self) -> Path:
        return self.path / ADAPTER_MANIFEST

    @property
    def tokenizer(self) -> Path:
        return self.path / TOKENIZER

    @property
    def config(self) -> Path:
        """The base model's config.json."""
        return self.path / CONFIG

    @property
    def chat_template(self) -> Path:
        """The very template that trained."""
        return self.path / CHAT_TEMPLATE

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def loss_plot(self) -> Path:
        return self.path / "loss.svg"

    def left_by_training(self) -> list[Path]:
        """Return what is there of what follows from checkpoints: a run without any has none of these."""
        names = (ADAPTER_MODEL, ADAPTER_CONFIG, ADAPTER_MANIFEST, PUBLISHED)
        places = (*(self.path / name for name in names), self.loss_plot)
        return [place for place in places if place.exists()]

    @property
    def checkpoints(self) -> Path:
        return self.path / CHECKPOINTS

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint after `step` steps."""
        return self.checkpoints / f"step-{step:06d}"
