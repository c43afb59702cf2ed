"""Choose which plugin serves a request, and keep a reason per candidate and stage.

Pure: a request, the machine as probed, and the candidates go in; a decision and its records
come out. Finding candidates is `discovery`, measuring the machine is `hardware`, verifying
bytes and starting the chosen worker are `launch` and `workers`; what those two saw of an
earlier attempt comes back in as `outcomes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from vox_host.errors import IntegrityError, NoCandidateError, VoxError
from vox_host.manifest import Manifest
from vox_host.receipt import Receipt, describe_trust
from vox_host.requirements import Requirement, parse_requirement
from vox_plugin_api.messages import PROTOCOL_MAX, PROTOCOL_MIN, Capability, Numerics

if TYPE_CHECKING:
    from vox_host.hardware.record import Device, Machine

__all__ = [
    "AUTO",
    "STAGES",
    "Candidate",
    "Problem",
    "Request",
    "Resolution",
    "StageRecord",
    "explain",
    "resolve",
]

AUTO = "auto"

Stage = Literal[
    "found", "manifest", "integrity", "protocol", "platform", "hardware", "start", "self-test", "health"
]
STAGES: tuple[Stage, ...] = get_args(Stage)
_AFTER_START: tuple[Stage, ...] = ("start", "self-test", "health")

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


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is asked for."""

    plugin: str = AUTO
    """A plugin's id, or `auto`. A named plugin is used or refused, never replaced."""
    capability: Capability = "generate"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The choice and all reasons."""

    chosen: Candidate
    records: tuple[StageRecord, ...]
    degraded_reason: str | None
    """Set where `auto` landed on the CPU although something faster was meant to run."""
    failed: tuple[str, ...] = ()
    """The accelerator plugins that `degraded_reason` is about."""
    warnings: tuple[str, ...] = ()
    """What must be said aloud about the chosen plugin."""


_CHANGED = frozenset({"integrity-mismatch", "receipt-invalid", "receipt-unreadable"})


def resolve(
    request: Request,
    machine: Machine,
    candidates: Sequence[Candidate],
    outcomes: Sequence[StageRecord] = (),
) -> Resolution:
    """Return the candidate to start.

    `outcomes` are the failures of earlier attempts to start (stages start, self-test, health).

    Raises:
        NoCandidateError: nothing fits, or the named plugin doesn't; one fact per candidate.
        IntegrityError: the named plugin (with `auto`, any installed one) was changed, or is
            not verified where that is required.
    """
    records = explain(request, machine, candidates, outcomes)
    failures = {record.plugin_id: record for record in records if record.status == "failed"}
    ordered = sorted(candidates, key=_preference)
    if request.plugin != AUTO:
        named = [c for c in ordered if c.plugin_id == request.plugin]
        if not named:
            raise _not_installed(request, ordered)
        if request.plugin in failures:
            raise _named_refused(named[0], failures[request.plugin])
        chosen = named[0]
    else:
        # A changed plugin is no reason to quietly use another one.
        for candidate in ordered:
            record = failures.get(candidate.plugin_id)
            if record is not None and record.code in _CHANGED:
                raise _named_refused(candidate, record)
        fitting = [c for c in ordered if c.plugin_id not in failures]
        if not fitting:
            raise _nothing_fits(request, ordered, failures)
        chosen = fitting[0]
    reason: str | None = None
    failed: tuple[str, ...] = ()
    if request.plugin == AUTO and chosen.lane == "cpu":
        reason, failed = _why_degraded(machine, ordered, failures)
    warnings = tuple(
        record.detail
        for record in records
        if record.plugin_id == chosen.plugin_id and record.status == "warned"
    )
    return Resolution(
        chosen=chosen, records=records, degraded_reason=reason, failed=failed, warnings=warnings
    )


def explain(
    request: Request,
    machine: Machine,
    candidates: Sequence[Candidate],
    outcomes: Sequence[StageRecord] = (),
) -> tuple[StageRecord, ...]:
    """Return one record per candidate and stage, in the order of preference."""
    records: list[StageRecord] = []
    for candidate in sorted(candidates, key=_preference):
        records.extend(_records_of(request, machine, candidate, outcomes))
    return tuple(records)


def _preference(candidate: Candidate) -> tuple[int, int, str, str]:
    # A total order that no discovery order can change; broken manifests last.
    if candidate.manifest is None:
        return (10_000, 2, candidate.plugin_id, candidate.location)
    lane_class = 1 if candidate.lane == "cpu" else 0
    return (-candidate.manifest.priority, lane_class, candidate.plugin_id, candidate.location)


def _records_of(
    request: Request, machine: Machine, candidate: Candidate, outcomes: Sequence[StageRecord]
) -> list[StageRecord]:
    records: list[StageRecord] = []
    failed_at: Stage | None = None
    for stage in STAGES:
        if failed_at is not None:
            blank = _record(candidate, stage, "not-reached", "not-reached", f"stopped at {failed_at}")
            records.append(blank)
            continue
        record = _judge(stage, request, machine, candidate, outcomes)
        records.append(record)
        if record.status == "failed":
            failed_at = stage
    return records


def _judge(
    stage: Stage,
    request: Request,
    machine: Machine,
    candidate: Candidate,
    outcomes: Sequence[StageRecord],
) -> StageRecord:
    problem = candidate.problem
    if problem is not None and problem.stage == stage:
        return _record(candidate, stage, "failed", problem.code, problem.detail, problem.remedy)
    if stage == "found":
        notes = "".join(f"; {note}" for note in candidate.notes)
        return _record(candidate, stage, "passed", "found", f"{candidate.location}{notes}")
    if stage in _AFTER_START:
        for outcome in outcomes:
            if outcome.plugin_id == candidate.plugin_id and outcome.stage == stage:
                return replace(outcome, version=candidate.version)
        return _record(candidate, stage, "not-tried", "not-tried", "not started yet")
    if candidate.manifest is None and problem is not None:
        return _record(candidate, stage, "not-tried", "not-read", f"not read: {problem.code}")
    if candidate.manifest is None:
        # A candidate without manifest and without a problem that says why can't be judged.
        return _record(candidate, stage, "failed", "manifest-missing", "no manifest was read")
    manifest = candidate.manifest
    if stage == "manifest":
        return _judge_manifest(request, candidate, manifest)
    if stage == "integrity":
        return _judge_integrity(request, candidate)
    if stage == "protocol":
        return _judge_protocol(candidate, manifest)
    if stage == "platform":
        return _judge_platform(machine, candidate, manifest)
    return _judge_hardware(machine, candidate, manifest)


def _judge_manifest(request: Request, candidate: Candidate, manifest: Manifest) -> StageRecord:
    backend = manifest.backend
    if request.capability not in backend.capabilities:
        offered = ", ".join(backend.capabilities)
        detail = f'has no capability "{request.capability}"; it has {offered}'
        return _record(candidate, "manifest", "failed", "capability-missing", detail)
    if request.numerics is not None and request.numerics not in backend.numerics:
        offered = ", ".join(backend.numerics)
        detail = f'has no "{request.numerics}" numerics; it has {offered}'
        return _record(candidate, "manifest", "failed", "numerics-missing", detail)
    detail = f"lane {backend.lane}, numerics {', '.join(backend.numerics)}"
    return _record(candidate, "manifest", "passed", "manifest-valid", detail)


def _judge_integrity(request: Request, candidate: Candidate) -> StageRecord:
    receipt = candidate.receipt
    if receipt is not None and receipt.trust == "verified":
        detail = f"{describe_trust(receipt)}; tree sha256:{receipt.tree_digest}"
        return _record(candidate, "integrity", "passed", "verified", detail)
    if receipt is not None:
        detail = f"development install of {receipt.source}: no checksum vouches for its archive"
        remedy = "Install a released folder or wheel with its manifest to have it verified."
    else:
        detail = f"{candidate.location} lies in the host's own environment: no receipt covers its files"
        remedy = "Install it into the plugin folder: vox-host plugin install --path SOURCE"
    status: Status = "failed" if request.require_verified else "warned"
    code = "not-verified" if request.require_verified else "development"
    if request.require_verified:
        detail += "; verified plugins are required"
    return _record(candidate, "integrity", status, code, detail, remedy)


def _judge_protocol(candidate: Candidate, manifest: Manifest) -> StageRecord:
    host = f"{PROTOCOL_MIN}" if PROTOCOL_MIN == PROTOCOL_MAX else f"{PROTOCOL_MIN} to {PROTOCOL_MAX}"
    text = f'speaks protocol "{manifest.plugin.protocol}", this host protocol {host}'
    if any(manifest.accepts_protocol(version) for version in range(PROTOCOL_MIN, PROTOCOL_MAX + 1)):
        return _record(candidate, "protocol", "passed", "protocol-common", text)
    return _record(
        candidate,
        "protocol",
        "failed",
        "protocol-unsupported",
        f"{text} ({candidate.location})",
        f'Install a version of "{candidate.plugin_id}" made for this host, or another host.',
    )


def _judge_platform(machine: Machine, candidate: Candidate, manifest: Manifest) -> StageRecord:
    reason = platform_refusal(manifest, machine.os, machine.arch)
    if reason is not None:
        return _record(candidate, "platform", "failed", "platform-unsupported", reason)
    return _record(candidate, "platform", "passed", "platform-supported", machine.platform)


def platform_refusal(manifest: Manifest, os: str, arch: str) -> str | None:
    """Say in one clause why a plugin can't run on this operating system and architecture."""
    requires = manifest.requires
    if os not in requires.os:
        return f"needs {' or '.join(requires.os)}; this is {os}"
    if requires.arch is not None and arch not in requires.arch:
        return f"needs {' or '.join(requires.arch)}; this machine is {arch}"
    return None


def _judge_hardware(machine: Machine, candidate: Candidate, manifest: Manifest) -> StageRecord:
    requirements = [parse_requirement(text) for text in manifest.requires.devices]
    if not requirements:
        return _record(candidate, "hardware", "passed", "no-device-needed", "needs no device")
    met: list[str] = []
    for namespace in sorted({r.namespace for r in requirements}):
        group = [r for r in requirements if r.namespace == namespace]
        refusal, by, remedy = _meet(machine, namespace, group)
        if refusal is not None:
            return _record(candidate, "hardware", "failed", "device-missing", refusal, remedy)
        met.append(by)
    return _record(candidate, "hardware", "passed", "device-found", ", ".join(met))


_PROBES = {"nvidia": ("nvml", "nvidia-smi"), "apple": ("sysctl", "vm_stat")}
_VENDOR = {"nvidia": "an NVIDIA", "apple": "an Apple"}


def _meet(machine: Machine, namespace: str, group: list[Requirement]) -> tuple[str | None, str, str | None]:
    """Return (refusal or None, what met it, remedy)."""
    needs = ", ".join(r.text for r in group)
    if namespace == "cpu":
        lacking = [r.value for r in group if r.value not in machine.cpu.isa]
        if lacking:
            return f"needs {', '.join(lacking)}; {machine.cpu.name} has not", "", None
        return None, machine.cpu.name, None
    devices = [d for d in machine.devices if d.kind == namespace]
    if not devices:
        # The probe's own sentence is the reason a user can act on, where there is one.
        for problem in machine.problems:
            if problem.source in _PROBES[namespace]:
                return f"needs {_VENDOR[namespace]} device; {problem.detail}", "", problem.remedy
        return f"needs {_VENDOR[namespace]} device; this machine has none", "", None
    seen: list[str] = []
    for device in devices:
        name = f"{device.name} ({namespace} {device.index})"
        if not device.is_visible:
            seen.append(f"{name} is hidden by CUDA_VISIBLE_DEVICES")
            continue
        unmet = [text for text in (_lack(machine, device, r) for r in group) if text]
        if not unmet:
            return None, name, None
        seen.append(f"{name} has {', '.join(unmet)}")
    return f"needs {needs}; {'; '.join(seen)}", "", None


def _lack(machine: Machine, device: Device, requirement: Requirement) -> str | None:
    feature = requirement.feature
    value: str | None
    if feature == "macos":
        value = machine.os_version
    elif feature == "memory_gib":
        value = None if device.total_bytes is None else f"{device.total_bytes / (1 << 30):.1f}"
    else:
        value = getattr(device, feature)
    if value is None:
        return f"{feature} not reported"
    try:
        return None if requirement.accepts(value) else f"{feature} {value}"
    except ValueError:
        return f"{feature} {value}, which is not a version"


def _why_degraded(
    machine: Machine, ordered: Sequence[Candidate], failures: dict[str, StageRecord]
) -> tuple[str | None, tuple[str, ...]]:
    reasons = []
    failed = []
    for candidate in ordered:
        record = failures.get(candidate.plugin_id)
        if record is None or candidate.lane == "cpu":
            continue
        failed.append(candidate.plugin_id)
        reasons.append(f'plugin "{candidate.plugin_id}" was not used: {record.detail}')
    if not reasons:
        idle = [d.name for d in machine.devices if d.is_visible]
        if idle:
            reasons.append(f"{', '.join(idle)} is here, but no plugin for it is installed")
        # A probe speaks of an accelerator only where there are signs of one.
        accelerators = {source for sources in _PROBES.values() for source in sources}
        reasons += [p.detail for p in machine.problems if p.source in accelerators and not idle]
    if not reasons:
        return None, ()
    return f"running on the CPU; {'; '.join(reasons)}", tuple(failed)


def _record(
    candidate: Candidate, stage: Stage, status: Status, code: str, detail: str, remedy: str | None = None
) -> StageRecord:
    return StageRecord(
        plugin_id=candidate.plugin_id,
        version=candidate.version,
        stage=stage,
        status=status,
        code=code,
        detail=detail,
        remedy=remedy,
    )


def _not_installed(request: Request, ordered: Sequence[Candidate]) -> NoCandidateError:
    known = [(c.plugin_id, c.version or "broken") for c in ordered]
    return NoCandidateError(
        "plugin-not-found",
        f'plugin "{request.plugin}" is not installed; nothing was started',
        facts=known or [("installed", "no plugin at all")],
        remedy="Install one: vox-host plugin install --path SOURCE",
    )


def _named_refused(candidate: Candidate, record: StageRecord) -> VoxError:
    version = f" {candidate.version}" if candidate.version else ""
    kind = IntegrityError if record.stage == "integrity" else NoCandidateError
    return kind(
        record.code,
        f'plugin "{candidate.plugin_id}"{version} can\'t run here; nothing was started',
        facts=[("stage", record.stage), ("reason", record.detail), ("found at", candidate.location)],
        remedy=record.remedy or f"vox-host plugin explain {candidate.plugin_id} shows every stage.",
    )


def _nothing_fits(
    request: Request, ordered: Sequence[Candidate], failures: dict[str, StageRecord]
) -> NoCandidateError:
    asked = request.capability if request.numerics is None else f"{request.capability}, {request.numerics}"
    facts: list[tuple[str, Any]] = [("request", asked)]
    facts += [(c.plugin_id, failures[c.plugin_id].detail) for c in ordered]
    if not ordered:
        return NoCandidateError(
            "no-candidate",
            "no plugin is installed; nothing was started",
            facts=facts,
            remedy="Install one: vox-host plugin install --path SOURCE",
        )
    return NoCandidateError(
        "no-candidate",
        f'no installed plugin can run "{request.capability}" here; nothing was started',
        facts=facts,
        remedy="vox-host plugin explain shows every stage; vox-host doctor shows the machine.",
    )
