"""What resolution works on: candidates, a request, and what a stage said of a candidate."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from vox_host.execution import describe_lane
from vox_host.manifest import Manifest
from vox_host.receipt import Receipt
from vox_plugin_api.messages import Capability, Numerics

__all__ = ["AUTO", "STAGES", "Candidate", "Problem", "Request", "Stage", "StageRecord", "Status"]

AUTO = "auto"

Stage = Literal[
    "found", "manifest", "integrity", "protocol", "platform", "hardware", "start", "self-test", "health"
]
STAGES: tuple[Stage, ...] = get_args(Stage)

Status = Literal["passed", "warned", "failed", "not-reached", "not-tried"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """Why a candidate can't be used, as found before anything was asked of it."""

    stage: Stage
    code: str
    detail: str
    remedy: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One plugin that was found, whole or broken."""

    plugin_id: str
    version: str | None
    origin: Literal["installed", "environment"]
    """installed: in the plugin folder, with its own environment and a receipt; environment: a
    distribution beside the host, without either."""
    location: str
    """The path of Plugin.toml, or of what is broken."""
    manifest: Manifest | None = None
    manifest_digest: str | None = None
    receipt: Receipt | None = None
    tree: Path | None = None
    """The installed tree that its receipt covers."""
    python: Path | None = None
    """The interpreter that starts its worker."""
    problem: Problem | None = None
    notes: tuple[str, ...] = ()
    """What else claimed this id, and why it is not used."""

    @property
    def lane(self) -> str | None:
        return None if self.manifest is None else self.manifest.backend.lane

    @property
    def execution(self) -> str | None:
        """Where the lane's kernels run, if not on the device that its name says."""
        return None if self.manifest is None else self.manifest.backend.execution

    @property
    def described_lane(self) -> str:
        """The lane as every list and report shows it: "cpu", or "metal (executed on CPU, ...)"."""
        return describe_lane(self.lane or "-", self.execution)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked for."""

    plugin: str = AUTO
    """A plugin's id, or `auto`. A named plugin is used or refused, never replaced."""
    capability: Capability = "generate"
    also: tuple[Capability, ...] = ()
    """What else it must be able to do."""
    numerics: Numerics | None = None
    """None: whatever the plugin offers."""
    require_verified: bool = False
    """Refuse plugins whose archive had no checksum to be verified against."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageRecord:
    """What one stage said about one candidate."""

    plugin_id: str
    version: str | None
    stage: Stage
    status: Status
    code: str
    detail: str
    remedy: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the record as JSON-ready data."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
