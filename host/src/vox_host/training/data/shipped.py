"""The data sets that come with vox-host (manifests/data)."""

from __future__ import annotations

from pathlib import Path

from vox_host.models.demo_model import manifests_dir

__all__ = ["shipped_data"]


def shipped_data(name: str, part: str = "train") -> Path:
    """Return the file of a shipped data set: `name` like "tool-calls", `part` "train" or "heldout"."""
    return manifests_dir().parent / "data" / name / f"{part}.jsonl"
