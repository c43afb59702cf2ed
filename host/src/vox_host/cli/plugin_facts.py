"""What is told of one plugin: its state, what vouches for its bytes, its last verdict, what it can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vox_host.receipt import describe_trust
from vox_host.resolution import Candidate
from vox_host.settings import Settings

if TYPE_CHECKING:
    from vox_host.integrity import LastCheck

__all__ = [
    "details_of",
    "last_check",
    "show_verdict",
    "state_of",
    "summary_of",
    "trust_of",
    "verdict_of",
]


def last_check(candidate: Candidate, settings: Settings) -> LastCheck | None:
    """Return what is known of its bytes since they were last read; None: it has no receipt."""
    from vox_host.integrity import since_last_check

    return since_last_check(candidate.receipt, settings.plugins_dir) if candidate.receipt else None


def state_of(candidate: Candidate, last: LastCheck | None) -> str:
    """Return "ok", or what is wrong with it."""
    if candidate.problem is not None:
        return candidate.problem.detail
    if last is None or last.state == "ok":
        return "ok"
    return f"{last.file}; vox-host plugin verify {candidate.plugin_id}"


def trust_of(candidate: Candidate, last: LastCheck | None) -> str:
    """Return what vouches for its bytes, in a word or two."""
    if candidate.problem is not None and candidate.problem.stage == "integrity":
        return "changed"
    # What was verified at the installation is not said of bytes that may be others now.
    if last is not None and last.state != "ok":
        return "changed since the last check" if last.state == "changed" else "unchecked"
    return candidate.receipt.trust if candidate.receipt else "no receipt"


def verdict_of(candidate: Candidate, settings: Settings) -> dict[str, Any] | None:
    """Return the verdict of its last `plugin check`; None: there was none."""
    from vox_host.conformance.record import describe

    return describe(settings.plugins_dir, candidate.plugin_id, candidate.receipt)


def show_verdict(verdict: dict[str, Any] | None) -> str:
    """Return a verdict in a word or two."""
    if verdict is None:
        return "not checked"
    if verdict["stale"]:
        return f"stale: {verdict['stale']}"
    where = f" ({verdict['execution']})" if verdict["execution"] else ""
    return f"{verdict['verdict']}{where}"


def summary_of(candidate: Candidate, settings: Settings) -> dict[str, Any]:
    """Return what `plugin list --json` says of it."""
    problem = candidate.problem
    return {
        "id": candidate.plugin_id,
        "version": candidate.version,
        "lane": candidate.lane,
        "execution": candidate.execution,
        "numerics": candidate.manifest.backend.numerics if candidate.manifest else [],
        "capabilities": candidate.manifest.backend.capabilities if candidate.manifest else [],
        "origin": candidate.origin,
        "integrity": trust_of(candidate, last_check(candidate, settings)),
        "conformance": verdict_of(candidate, settings),
        "location": candidate.location,
        "path": str(candidate.tree) if candidate.tree else None,
        "notes": list(candidate.notes),
        "error": None
        if problem is None
        else {
            "stage": problem.stage,
            "code": problem.code,
            "detail": problem.detail,
            "remedy": problem.remedy,
        },
    }


def details_of(candidate: Candidate, settings: Settings) -> dict[str, Any]:
    """Return what `plugin show --json` says of it."""
    receipt = candidate.receipt
    manifest = candidate.manifest
    return {
        **summary_of(candidate, settings),
        "summary": manifest.plugin.summary if manifest else None,
        "protocol": manifest.plugin.protocol if manifest else None,
        "priority": manifest.priority if manifest else None,
        "manifest": candidate.location,
        "manifest_digest": candidate.manifest_digest,
        "python": str(candidate.python) if candidate.python else None,
        "vouched_for": describe_trust(receipt) if receipt else None,
        "distributions": [f"{d.name} {d.version}" for d in receipt.distributions] if receipt else [],
        "receipt": receipt.model_dump(mode="json", by_alias=True) if receipt else None,
    }
