"""The checkpoints of a run: what the worker saved, and how far the host was.

    checkpoints/step-000100/    adapter.safetensors, optimizer.safetensors, state.json: the worker's
                                host.json: ours, written last. A folder without it is no checkpoint.

A folder is written once and never over. What a kill left half done is removed when the run goes on:
an empty folder `.step-000100.saving` marks the one that is being saved, and one that is being removed
has another name and keeps its record to the last. Everything else in there is somebody else's, and stays.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_host.errors import IntegrityError, UsageError
from vox_host.runs.layout import CHECKPOINT_ADAPTER, RunDirectory
from vox_host.stat_cache import write_aside
from vox_host.training.metrics import Mark
from vox_host.training.pace import Course
from vox_host.training.record import RunRecord
from vox_plugin_api import train_messages as t

__all__ = ["Checkpoint", "Checkpoints", "HostState"]

HOST_STATE = "host.json"
_NAME = re.compile(r"step-(\d{6}|[1-9]\d{6,})")
_SAVING = re.compile(rf"\.({_NAME.pattern})\.saving")
_GONE = re.compile(rf"\.{_NAME.pattern}\.gone")
_HEX = r"^[0-9a-f]{64}$"


class HostState(BaseModel):
    """host.json: everything but adapter and optimizer that a run needs to go on to the same bytes.

    The place in the data is the step alone: the order of an epoch follows from the seed.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    schema_version: Literal[2] = 2
    """1 did not say what the run is."""
    run: RunRecord
    """What the run is: run.json as it was begun, which a resumed run is held against."""
    step: int = Field(ge=0)
    adapter_digest: str = Field(pattern=_HEX)
    files: dict[str, str]
    """SHA-256 of each of the worker's files."""
    first_loss: float | None
    best_loss: float | None
    best_step: int | None
    without_gain: int = Field(ge=0)
    metrics_bytes: int = Field(ge=0)
    """metrics.jsonl up to here, and its SHA-256."""
    metrics_sha256: str = Field(pattern=_HEX)
    record_digest: str | None = Field(default=None, pattern=_HEX)
    """In the file: SHA-256 of its text with null here. None: in memory."""

    @staticmethod
    def of(run: RunRecord, course: Course, saved: t.TrainSaveResult, mark: Mark) -> HostState:
        """Put it together after a save."""
        return HostState(
            run=run,
            step=course.step,
            adapter_digest=saved.adapter_digest,
            files=dict(saved.files),
            first_loss=course.first_loss,
            best_loss=course.best_loss,
            best_step=course.best_step,
            without_gain=course.without_gain,
            metrics_bytes=mark.size_bytes,
            metrics_sha256=mark.sha256,
        )

    @property
    def course(self) -> Course:
        return Course(
            step=self.step,
            first_loss=self.first_loss,
            best_loss=self.best_loss,
            best_step=self.best_step,
            without_gain=self.without_gain,
        )

    @property
    def mark(self) -> Mark:
        return Mark(self.metrics_bytes, self.metrics_sha256)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole."""

    folder: Path
    state: HostState


class Checkpoints:
    """The folder of a run's checkpoints. Whoever changes anything holds the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, step: int) -> Path:
        """Return where the checkpoint after `step` steps is, or would be."""
        return self.folder / f"step-{step:06d}"

    def steps(self) -> list[int]:
        """Return the steps of the checkpoints that are whole, ascending."""
        if not self.folder.is_dir():
            return []
        found = [(entry, _NAME.fullmatch(entry.name)) for entry in self.folder.iterdir()]
        return sorted(int(match[1]) for entry, match in found if match and _is_ours(entry))

    def records(self) -> list[tuple[Path, RunRecord]]:
        """Return what each one says the run is, with the file that says it; damaged ones say nothing."""
        said = []
        for step in self.steps():
            # To name the damage is for whoever goes on from one.
            with contextlib.suppress(IntegrityError):
                said.append((self.path(step) / HOST_STATE, self._record(step).run))
        return said

    def read(self, step: int) -> Checkpoint:
        """Return one, its files held against what was recorded.

        Raises:
            IntegrityError: something in it is not what was written.
        """
        folder, state = self.path(step), self._record(step)
        for name, expected in state.files.items():
            found = _digest(folder / name)
            if found != f"sha256:{expected}":
                raise self._damaged(step, name, f"sha256:{expected}", found)
        return Checkpoint(folder, state)

    def _record(self, step: int) -> HostState:
        try:
            state = HostState.model_validate_json((self.path(step) / HOST_STATE).read_bytes())
        except OSError as error:
            found = f"it can't be read: {error.strerror or error}"
            raise self._damaged(step, HOST_STATE, "a checkpoint's record", found) from None
        except ValidationError as error:
            problems = [": ".join([".".join(map(str, e["loc"])), e["msg"]]) for e in error.errors()]
            found = "; ".join(problem.removeprefix(": ") for problem in problems[:5])
            raise self._damaged(step, HOST_STATE, "a checkpoint's record", found) from None
        if state.step != step:
            raise self._damaged(step, HOST_STATE, f"the record of step {step}", f"that of step {state.step}")
        told, state = state.record_digest, state.model_copy(update={"record_digest": None})
        if told != _record_digest(state):
            found = "no digest of its own" if told is None else f"sha256:{told}"
            raise self._damaged(step, HOST_STATE, f"sha256:{_record_digest(state)}", found)
        return state

    def _damaged(self, step: int, name: str, expected: str, found: str) -> IntegrityError:
        # What came after it may need it: to go on from one takes the best of its time.
        others = self.steps()
        gone = [self.path(other) for other in others if other >= step] or [self.path(step)]
        left = [other for other in others if other < step]
        # Without any, what was published of them would be in the way of a new start.
        gone += [] if left else RunDirectory(self.folder.parent).left_by_training()
        goes_on = f"the checkpoint before it, step {left[-1]}" if left else "the start: none is before it"
        return IntegrityError(
            "checkpoint-damaged",
            f"{self.path(step) / name} is not what the run wrote; nothing was trained",
            facts=[("file", str(self.path(step) / name)), ("expected", expected), ("found", found)],
            remedy=f"`rm -r {shlex.join(map(str, gone))}`, and the run goes on from {goes_on}.",
        )

    def latest(self) -> Checkpoint | None:
        """Return the newest; None: there is none.

        Raises:
            IntegrityError: it is damaged. An older one is not taken in its place unasked.
        """
        steps = self.steps()
        for step in self._without_record():
            if not steps or step > steps[-1]:
                raise self._damaged(step, HOST_STATE, "a checkpoint's record", "no such file")
        return self.read(steps[-1]) if steps else None

    def _without_record(self) -> list[int]:
        """Return the steps that a worker saved and that lost their record; while it saves there is a mark."""
        found = [(entry, _NAME.fullmatch(entry.name)) for entry in self._entries() if not _is_ours(entry)]
        return [
            step
            for entry, match in found
            if match and (entry / CHECKPOINT_ADAPTER).is_file() and not entry.is_symlink()
            if not self._mark(step := int(match[1])).exists()
        ]

    def _entries(self) -> list[Path]:
        return sorted(self.folder.iterdir()) if self.folder.is_dir() else []

    def tidy(self) -> None:
        """Remove what a kill left half done."""
        self.folder.mkdir(exist_ok=True)
        for entry in list(self.folder.iterdir()):
            if (marked := _SAVING.fullmatch(entry.name)) and entry.is_dir():
                if not _is_ours(self.folder / marked[1]):
                    shutil.rmtree(self.folder / marked[1], ignore_errors=True)
                # Where workers of ours write before they rename.
                shutil.rmtree(self.folder / f".{marked[1]}.partial", ignore_errors=True)
                _unmark(entry)
            elif (
                _GONE.fullmatch(entry.name)
                and entry.is_dir()
                and (_is_ours(entry) or not any(entry.iterdir()))
            ):
                _clear(entry)

    def make_room(self, step: int) -> Path:
        """Return where the checkpoint after `step` steps is to be written; nothing is there.

        Raises:
            UsageError: `checkpoint-place-taken`: something is there that no run wrote.
        """
        path = self.path(step)
        if _is_ours(path):
            # It is of a run that was further than this one is now, and made the same bytes.
            self._remove(path)
        elif path.exists() or path.is_symlink():
            raise UsageError(
                "checkpoint-place-taken",
                f"{path} is where the checkpoint of step {step} goes, and no run wrote what is there; it was "
                "left as it is, and the step was not saved",
                facts=[("expected", f"nothing, or a checkpoint with its {HOST_STATE}"), ("found", str(path))],
                remedy="Move it elsewhere.",
            )
        # On disk before the worker writes: what a kill leaves there is told from what others put there.
        self._mark(step).mkdir(exist_ok=True)
        _sync(self.folder)
        return path

    def _mark(self, step: int) -> Path:
        return self.folder / f".{self.path(step).name}.saving"

    def complete(self, state: HostState) -> Checkpoint:
        """Add our record to what the worker saved: from now on it is a checkpoint."""
        folder = self.path(state.step)
        told = state.model_copy(update={"record_digest": _record_digest(state)})
        write_aside(folder / HOST_STATE, _record_text(told))
        _unmark(self._mark(state.step))
        return Checkpoint(folder, state)

    def keep_only(self, steps: set[int]) -> None:
        """Remove all others but those that these need."""
        for step in set(self.steps()) - self.with_needed(steps):
            self._remove(self.path(step))

    def with_needed(self, steps: set[int]) -> set[int]:
        """Return these and the best ones of each: to go on from one takes the best of its time."""
        kept = set(steps)
        for step in sorted(steps, reverse=True):
            # One that can't be read keeps nothing: the run never goes on from it.
            with contextlib.suppress(IntegrityError):
                best = self._record(step).best_step
                kept |= set() if best is None else {best}
        return kept

    def _remove(self, folder: Path) -> None:
        # First its name, by which it is a checkpoint: one that is half removed is none.
        gone = folder.with_name(f".{folder.name}.gone")
        folder.rename(gone)
        _clear(gone)


def _is_ours(folder: Path) -> bool:
    """Say whether a folder carries a record of ours; a link to one does not."""
    return folder.is_dir() and not folder.is_symlink() and (folder / HOST_STATE).is_file()


def _unmark(mark: Path) -> None:
    # A mark is empty; one that holds something is somebody's.
    with contextlib.suppress(OSError):
        mark.rmdir()


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(folder: Path) -> None:
    """Remove a folder, its record last: until then it can be told whose it is."""
    for entry in list(folder.iterdir()):
        if entry.name == HOST_STATE:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _record_text(state: HostState) -> bytes:
    return json.dumps(state.model_dump(mode="json"), indent=2).encode() + b"\n"


def _record_digest(state: HostState) -> str:
    return hashlib.sha256(_record_text(state)).hexdigest()


def _digest(path: Path) -> str:
    if path.exists() and not path.is_file():
        return "no plain file"  # to open a pipe may never end
    try:
        with path.open("rb") as file:
            return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
    except OSError as error:
        return error.strerror or str(error)
