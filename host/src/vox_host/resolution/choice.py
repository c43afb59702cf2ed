"""The choice among candidates, and the errors where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vox_host.errors import IntegrityError, NoCandidateError, UsageError, VoxError
from vox_host.resolution.candidate import AUTO, Candidate, Request, StageRecord
from vox_host.resolution.known import why_not_here
from vox_host.resolution.stages import PROBES, records_of

if TYPE_CHECKING:
    from vox_host.hardware.record import Machine

__all__ = ["Resolution", "explain", "named_plugin", "resolve"]


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


_CHANGED = frozenset({"integrity-mismatch", "receipt-changed", "receipt-invalid", "receipt-unreadable"})


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
            raise _unknown_plugin(request.plugin, ordered, machine.os)
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
    if chosen.execution is not None:
        warnings += (f"lane {chosen.described_lane}",)
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
        records.extend(records_of(request, machine, candidate, outcomes))
    return tuple(records)


def _preference(candidate: Candidate) -> tuple[int, int, str, str]:
    # A total order that no discovery order can change; broken manifests last.
    if candidate.manifest is None:
        return (10_000, 2, candidate.plugin_id, candidate.location)
    lane_class = 1 if candidate.lane == "cpu" else 0
    return (-candidate.manifest.priority, lane_class, candidate.plugin_id, candidate.location)


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
        accelerators = {source for sources in PROBES.values() for source in sources}
        reasons += [p.detail for p in machine.problems if p.source in accelerators and not idle]
    if not reasons:
        return None, ()
    return f"running on the CPU; {'; '.join(reasons)}", tuple(failed)


def named_plugin(candidates: Sequence[Candidate], plugin: str, os: str) -> Candidate:
    """Return the plugin of that id, broken or not.

    Raises:
        VoxError: there is none, or there can be none here.
    """
    for candidate in candidates:
        if candidate.plugin_id == plugin:
            return candidate
    raise _unknown_plugin(plugin, candidates, os)


def _unknown_plugin(plugin: str, candidates: Sequence[Candidate], os: str) -> VoxError:
    """Return the error of a plugin that was named and is not there: the same, whichever command asks."""
    alone, colon, _ = plugin.partition(":")
    if colon:
        return UsageError(
            "plugin-with-options",
            f'"{plugin}" is not the name of a plugin: ID:NAME=VALUE, with options of its lane, is what '
            "`vox-host parity --plugin` takes; nothing was started",
            remedy=f"Name the plugin alone: {alone}" if alone else "vox-host plugin list",
        )
    known = [(c.plugin_id, c.version or "broken") for c in candidates]
    never = why_not_here(plugin, os)
    if never is not None:
        return NoCandidateError(
            "platform-unsupported",
            f"{never}; nothing was started",
            facts=known,
            remedy="Name one that runs here: vox-host plugin list",
        )
    return NoCandidateError(
        "plugin-not-found",
        f'plugin "{plugin}" is not installed; nothing was started',
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
    numerics = () if request.numerics is None else (request.numerics,)
    asked = ", ".join((request.capability, *request.also, *numerics))
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
