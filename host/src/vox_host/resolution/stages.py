"""What each stage says of one candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from vox_host.manifest import Manifest
from vox_host.receipt import describe_trust
from vox_host.requirements import Requirement, parse_requirement
from vox_host.resolution.candidate import STAGES, Candidate, Request, Stage, StageRecord, Status
from vox_plugin_api.messages import PROTOCOL_MAX, PROTOCOL_MIN

if TYPE_CHECKING:
    from vox_host.hardware.record import Device, Machine

__all__ = ["AFTER_START", "PROBES", "platform_refusal", "records_of"]

AFTER_START: tuple[Stage, ...] = ("start", "self-test", "health")
"""What is known once a plugin was started."""


def records_of(
    request: Request, machine: Machine, candidate: Candidate, outcomes: Sequence[StageRecord]
) -> list[StageRecord]:
    """Return one record per stage; after the first that failed, the rest were not reached."""
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
    if stage in AFTER_START:
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
    lacking = [word for word in (request.capability, *request.also) if word not in backend.capabilities]
    if lacking:
        offered = ", ".join(backend.capabilities)
        detail = f'has no capability "{lacking[0]}"; it has {offered}'
        return _record(candidate, "manifest", "failed", "capability-missing", detail)
    if request.numerics is not None and request.numerics not in backend.numerics:
        offered = ", ".join(backend.numerics)
        detail = f'has no "{request.numerics}" numerics; it has {offered}'
        remedy = f"Ask for what {candidate.plugin_id} has: --numerics {backend.numerics[0]}."
        return _record(candidate, "manifest", "failed", "numerics-missing", detail, remedy)
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


PROBES = {"nvidia": ("nvml", "nvidia-smi"), "apple": ("sysctl", "vm_stat")}
"""Who speaks of which kind of device."""
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
            if problem.source in PROBES[namespace]:
                return f"needs {_VENDOR[namespace]} device; {problem.detail}", "", problem.remedy
        return f"needs {_VENDOR[namespace]} device; this machine has none", "", None
    seen: list[str] = []
    for device in devices:
        name = f"{device.name} ({namespace} {device.index})"
        if not device.is_visible:
            seen.append(f"{name} is hidden by CUDA_VISIBLE_DEVICES")
            continue
        if device.refusal is not None:
            seen.append(f"{name}: {device.refusal}")
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
