"""The choice among candidates, and the errors where there is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vox_host.errors import IntegrityError, NoCandidateError, UsageError, VoxError
from vox_host.resolution.candidate import AUTO, Candidate, Request, StageRecord
from vox_host.resolution.known import why_not_here
from vox_host.resolution.stages import AFTER_START, PROBES, records_of

if TYPE_CHECKING:
    from vox_host.hardware.record import Machine

__all__ = ["Resolution", "explain", "named_plugin", "resolve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The choice and all reasons."""

    chosen: Candidate
    records: tuple[StageRecord, ...]
    degraded_reason: str | None
    """Set where `auto` landed on the CPU although something faster was meant to run, and where a plugin
    that it tried first could not be used."""
    failed: tuple[str, ...] = ()
    """The plugins that `degraded_reason` is about."""
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
    `auto` never takes a plugin without canonical numerics where another one that was found has them,
    fit to run or not: bits of another kind are given to who asks for them or names the plugin.

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
    if request.plugin == AUTO:
        reason, failed = _why_degraded(request, machine, chosen, ordered, failures)
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
    settled = _with_numerics(request, candidates)
    for candidate in sorted(candidates, key=_preference):
        records.extend(records_of(settled, machine, candidate, outcomes))
    return tuple(records)


def _with_numerics(request: Request, candidates: Sequence[Candidate]) -> Request:
    """Return what `auto` means where no numerics are asked for: canonical ones, if any plugin has them."""
    if request.plugin == AUTO and request.numerics is None and any(map(_is_canonical, candidates)):
        return replace(request, numerics="canonical")
    return request


def _is_canonical(candidate: Candidate) -> bool:
    return candidate.manifest is not None and "canonical" in candidate.manifest.backend.numerics


def _preference(candidate: Candidate) -> tuple[int, int, str, str]:
    # A total order that no discovery order can change; broken manifests last.
    if candidate.manifest is None:
        return (10_000, 2, candidate.plugin_id, candidate.location)
    lane_class = 1 if candidate.lane == "cpu" else 0
    return (-candidate.manifest.priority, lane_class, candidate.plugin_id, candidate.location)


def _why_degraded(
    request: Request,
    machine: Machine,
    chosen: Candidate,
    ordered: Sequence[Candidate],
    failures: dict[str, StageRecord],
) -> tuple[str | None, tuple[str, ...]]:
    is_on_cpu = chosen.lane == "cpu"
    reasons = []
    failed = []
    for candidate in ordered:
        record = failures.get(candidate.plugin_id)
        if record is None:
            continue
        # One that was started and failed was to be used. Of the others an accelerator's, and one that might
        # have had canonical numerics, if only it could be read.
        was_meant = is_on_cpu and candidate.lane != "cpu"
        was_meant |= candidate.manifest is None and not _is_canonical(chosen)
        was_meant &= record.code != "numerics-missing" or request.numerics is not None
        if was_meant or record.stage in AFTER_START:
            failed.append(candidate.plugin_id)
            reasons.append(f'plugin "{candidate.plugin_id}" was not used: {record.detail}')
    if is_on_cpu and not reasons:
        idle = [d.name for d in machine.devices if d.is_visible]
        if idle:
            reasons.append(f"{', '.join(idle)} is here, but no plugin for it is installed")
        # A probe speaks of an accelerator only where there are signs of one.
        accelerators = {source for sources in PROBES.values() for source in sources}
        reasons += [p.detail for p in machine.problems if p.source in accelerators and not idle]
    if not reasons:
        return None, ()
    where = "the CPU" if is_on_cpu else f"lane {chosen.described_lane}"
    return f"running on {where}, by {chosen.plugin_id}; {'; '.join(reasons)}", tuple(failed)


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
    settled = _with_numerics(request, ordered)
    numerics = () if settled.numerics is None else (settled.numerics,)
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
    remedy = "vox-host plugin explain shows every stage; vox-host doctor shows the machine."
    others = [r for r in failures.values() if r.code == "numerics-missing" and r.remedy is not None]
    if request.numerics is None and others:
        remedy = f"{others[0].remedy} {remedy}"
    return NoCandidateError(
        "no-candidate",
        f'no installed plugin can run "{request.capability}" here; nothing was started',
        facts=facts,
        remedy=remedy,
    )
