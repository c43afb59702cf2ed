"""A run with nothing left to do is told so before anything is started for it."""

from __future__ import annotations

from vox_host.errors import VoxError
from vox_host.runs.layout import PUBLISHED, RunDirectory
from vox_host.runs.manifest import AdapterManifest, BaseModelRecord
from vox_host.runs.open import read_verified
from vox_host.training.checkpoints import Checkpoint, Checkpoints
from vox_host.training.drive import Outcome
from vox_host.training.pace import checkpoints_to_keep
from vox_host.training.record import RunRecord, record_digest

__all__ = ["finished"]


def finished(run: RunDirectory, record: RunRecord, base: BaseModelRecord) -> Outcome | None:
    """Return how a run ended to which `drive` would change nothing; None: something is left, or may be.

    Nothing is changed here. Whoever calls holds the run.

    Args:
        base: what the adapter is to name as its base: the model may have another name or place by now.

    Raises:
        IntegrityError: its newest checkpoint is damaged.
    """
    checkpoints, pace = Checkpoints(run.checkpoints), record.options.pace
    latest = checkpoints.latest()
    if latest is None:
        return None
    course = latest.state.course
    ended = course.end(pace)
    if ended is None:
        return None
    kept = checkpoints_to_keep(checkpoints.steps(), pace, best=course.best_step)
    names = {checkpoints.path(step).name for step in checkpoints.with_needed(kept)}
    is_tidy = {entry.name for entry in run.checkpoints.iterdir()} == names
    if not (is_tidy and run.loss_plot.is_file() and _has_its_lines(run, latest)):
        return None
    published = latest.state.step if course.best_step is None else course.best_step
    manifest = _published(run)
    right = (published, record_digest(record), base)
    if manifest is None or (manifest.step, manifest.run_digest, manifest.base_model) != right:
        return None
    return Outcome(ended=ended, course=course, checkpoint=latest)


def _has_its_lines(run: RunDirectory, latest: Checkpoint) -> bool:
    """Whether metrics.jsonl ends where the last checkpoint saw it end; its bytes are `drive`'s to hold."""
    return run.metrics.is_file() and run.metrics.stat().st_size == latest.state.mark.size_bytes


def _published(run: RunDirectory) -> AdapterManifest | None:
    """Return what is published, where it is whole and in its place."""
    if (run.path / PUBLISHED).exists():
        return None
    try:
        _, manifest = read_verified(run.path)
    except VoxError:
        return None
    return manifest
