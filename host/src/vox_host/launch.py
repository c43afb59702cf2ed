"""From a chosen candidate to a plan that a worker can be started with, its bytes verified."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from vox_host.environment_use import hold_environment
from vox_host.errors import IntegrityError, PluginError, VoxError
from vox_host.integrity import verify_installation
from vox_host.resolution import Candidate, Problem

if TYPE_CHECKING:
    from vox_host.workers.launch import LaunchPlan

__all__ = ["plan_launch", "with_verified_bytes"]

log = logging.getLogger(__name__)


def plan_launch(
    candidate: Candidate, *, plugins_dir: Path, log_dir: Path, require_verified: bool = False
) -> LaunchPlan:
    """Verify a candidate's installed tree, hold it, and return what starts its worker.

    Called before every start, so that a byte changed since the last one is seen.

    Raises:
        IntegrityError: the tree differs from its receipt, or is not verified where that is
            required; nothing was started.
        PluginError: the candidate can't be started at all.
    """
    if candidate.problem is not None:
        kind = IntegrityError if candidate.problem.stage == "integrity" else PluginError
        raise kind(
            candidate.problem.code,
            f'plugin "{candidate.plugin_id}" can\'t be started: {candidate.problem.detail}',
            remedy=candidate.problem.remedy,
        )
    if candidate.python is None or candidate.manifest_digest is None or candidate.version is None:
        raise PluginError(
            "no-worker",
            f'plugin "{candidate.plugin_id}" has nothing that starts a worker',
            remedy=f"vox-host plugin explain {candidate.plugin_id} shows what it has.",
        )
    receipt = candidate.receipt
    if require_verified and (receipt is None or receipt.trust != "verified"):
        raise IntegrityError(
            "not-verified",
            f'nothing vouches for plugin "{candidate.plugin_id}", and verified plugins are required; '
            "it was not started",
            facts=[("found at", candidate.location)],
            remedy="Install a released folder, or leave out --require-verified.",
        )
    started = time.monotonic()
    if receipt is not None:
        # First, so that what is verified is still there when the worker starts, and until it ends.
        hold_environment(plugins_dir, receipt.environment)
        verification = verify_installation(receipt, plugins_dir)
        log.info(
            "plugin.verified id=%s files=%d hashed=%d verify_ms=%.0f",
            candidate.plugin_id,
            verification.files,
            verification.hashed,
            (time.monotonic() - started) * 1000,
        )
    if receipt is None or receipt.trust != "verified":
        log.warning(
            "plugin.unverified id=%s version=%s: no checksum vouches for it (%s)",
            candidate.plugin_id,
            candidate.version,
            "development install" if receipt else "not installed, found beside the host",
        )
    # Imported late: listing and explaining plugins must not pay for the worker machinery.
    from vox_host.workers.launch import LaunchPlan

    return LaunchPlan(
        plugin_id=candidate.plugin_id,
        plugin_version=candidate.version,
        python=candidate.python,
        manifest_digest=candidate.manifest_digest,
        log_dir=log_dir,
    )


def with_verified_bytes(
    candidates: Sequence[Candidate], plugins_dir: Path, *, full: bool = False
) -> list[Candidate]:
    """Return the candidates with a problem where an installed tree differs from its receipt."""
    checked = []
    for candidate in candidates:
        if candidate.receipt is not None and candidate.problem is None:
            try:
                verify_installation(candidate.receipt, plugins_dir, full=full)
            except VoxError as error:
                facts = "".join(f"; {name} {value}" for name, value in error.facts)
                problem = Problem(
                    stage="integrity",
                    code=error.code,
                    detail=f"{error.message}{facts}",
                    remedy=error.remedy,
                )
                candidate = replace(candidate, problem=problem)
        checked.append(candidate)
    return checked
