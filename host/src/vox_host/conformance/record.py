"""Keep a verdict beside the receipt it is about, and say when it is of another time.

    plugins/.verdicts/mens-cpu-ref.json

A verdict is one of a tree digest, a version of the numerics and a suite. When any of them is
another one now, it is shown as stale and counts for nothing.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vox_host.conformance.expected import load_models, suite_digest
from vox_host.conformance.verdict import Report
from vox_host.receipt import Receipt
from vox_host.stat_cache import write_aside

__all__ = ["StoredVerdict", "describe", "forget", "read_verdict", "store_verdict", "verdict_path"]

_FOLDER = ".verdicts"


class StoredVerdict(BaseModel):
    """What a whole check said, and of what."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_version: Literal[1] = 1
    verdict: str
    cases: int
    failed: int
    not_comparable: int = 0
    plugin: str
    plugin_version: str
    plugin_tree_digest: str
    numerics_version: int
    suite_digest: str
    checked_at: str
    """UTC, ISO 8601."""
    execution: str | None = None
    """Where the lane's kernels ran, if not on the device that its name says."""
    first_difference: dict[str, Any] | None = None
    lane_facts: dict[str, Any] | None = None
    """What the lane said of itself when it loaded a model: what it runs on, and what it uses there."""

    def stale_because(self, receipt: Receipt | None) -> str | None:
        """Return why this verdict is not about what is installed now; None: it is."""
        if receipt is None or receipt.tree_digest != self.plugin_tree_digest:
            return "the installed tree is another one"
        if self.numerics_version != int(load_models()[0]["numerics_version"]):
            return "the numerics are of another version"
        if self.suite_digest != suite_digest():
            return "this vox-host has another suite"
        return None


def verdict_path(plugins_dir: Path, plugin_id: str) -> Path:
    """Return where the verdict on a plugin lies."""
    return plugins_dir / _FOLDER / f"{plugin_id}.json"


def store_verdict(plugins_dir: Path, report: Report) -> Path | None:
    """Store a whole check's verdict, in one step; None: it is one about no installed tree, or of a part."""
    if report.plugin_tree_digest is None or not report.is_complete:
        return None
    first = report.first_difference
    stored = StoredVerdict(
        verdict=report.verdict,
        cases=report.cases,
        failed=report.failed,
        not_comparable=report.not_comparable,
        plugin=report.plugin,
        plugin_version=report.plugin_version,
        plugin_tree_digest=report.plugin_tree_digest,
        numerics_version=report.numerics_version,
        suite_digest=report.suite_digest,
        checked_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        execution=report.execution,
        first_difference=first.as_dict() if first else None,
        lane_facts=report.observation.get("lane"),
    )
    path = verdict_path(plugins_dir, report.plugin)
    path.parent.mkdir(exist_ok=True)
    write_aside(path, stored.model_dump_json(indent=1).encode() + b"\n")
    return path


def read_verdict(plugins_dir: Path, plugin_id: str) -> StoredVerdict | None:
    """Return the stored verdict; None: there is none, or none that can be read."""
    try:
        return StoredVerdict.model_validate_json(verdict_path(plugins_dir, plugin_id).read_bytes())
    except (OSError, ValidationError):
        return None


def describe(plugins_dir: Path, plugin_id: str, receipt: Receipt | None) -> dict[str, Any] | None:
    """Return the verdict as facts for `list` and `show`, its staleness included."""
    stored = read_verdict(plugins_dir, plugin_id)
    if stored is None:
        return None
    return {**stored.model_dump(mode="json"), "stale": stored.stale_because(receipt)}


def forget(plugins_dir: Path, plugin_id: str) -> None:
    """Remove a plugin's verdict."""
    verdict_path(plugins_dir, plugin_id).unlink(missing_ok=True)
