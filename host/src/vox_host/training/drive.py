"""The loop of a run: steps, evaluations, checkpoints, the published adapter.

Everything that a run leaves follows from run.json and the data: whatever ends it, it goes on from its
last checkpoint to the same bytes. In this order, after each step: its line in metrics.jsonl, an
evaluation where one is due, a checkpoint where one is due, the published adapter, and last what is
no longer needed goes.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from vox_host.errors import IntegrityError, UsageError, VoxError
from vox_host.quoted import quoted
from vox_host.runs.layout import RunDirectory
from vox_host.stat_cache import write_aside
from vox_host.training.checkpoints import Checkpoint, Checkpoints, HostState
from vox_host.training.metrics import NOTHING, LineFile, read_lines
from vox_host.training.options import TrainingOptions
from vox_host.training.pace import Course, EndReason, Order, Scored, batch_of, checkpoints_to_keep, mean_loss
from vox_host.training.plot import loss_svg
from vox_host.training.record import RunRecord
from vox_plugin_api import train_messages as t
from vox_plugin_api.unwritten import errno_name, what_helps

__all__ = ["Job", "Outcome", "Reporter", "StepSeen", "Trainer", "drive"]

_AT_ONCE = 32
"""Held-out examples in one request."""

_NOT_WRITTEN = ("run-not-written", "save-failed", "publish-failed", "publish-unfinished")
"""Of a disk that wasn't written. A worker's remedy is for whoever goes on with it; this run has ended."""


class Trainer(Protocol):
    """What a `TrainingClient` is to the loop."""

    async def begin(self, params: t.TrainBeginParams) -> t.TrainBeginResult: ...

    async def step(self, examples: Sequence[t.TrainExample]) -> t.TrainStepResult: ...

    async def evaluate(self, examples: Sequence[t.TrainExample]) -> list[t.TrainEvaluateResult]: ...

    async def save(self, folder: str) -> t.TrainSaveResult: ...


@dataclass(frozen=True, slots=True)
class StepSeen:
    """A step, for whoever watches."""

    result: t.TrainStepResult
    epoch: int
    tokens: int
    """Of its examples, the learned ones and those before them."""
    seconds: float


class Reporter(Protocol):
    """Whoever watches a run."""

    def begun(self, begun: t.TrainBeginResult, course: Course) -> None: ...

    def stepped(self, seen: StepSeen) -> None: ...

    def evaluated(self, course: Course, loss: float) -> None: ...

    def saved(self, folder: Path) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run that is to be driven. Whoever drives it holds it (`lock`)."""

    run: RunDirectory
    title: str
    """Of the plot."""
    record: RunRecord
    """What the run is; each checkpoint keeps it."""
    options: TrainingOptions
    train: Sequence[t.TrainExample]
    held_out: Sequence[t.TrainExample]
    order: Order
    publish: Callable[[Checkpoint, t.TrainBeginResult], None]
    """Make a checkpoint's adapter the run's."""
    report: Reporter
    should_stop: Callable[[], bool]
    """Asked between two steps; True: save and return."""
    devices: int = 1
    """That share each step; no bit depends on it."""
    remember_bytes: int = 0
    """What the plan found room for (`TrainMemory`); nor on this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a run stands when the loop has ended."""

    ended: EndReason | Literal["interrupted"]
    course: Course
    checkpoint: Checkpoint | None
    """The newest; None: it was interrupted before the first step."""


async def drive(job: Job, trainer: Trainer) -> Outcome:
    """Take the run to its end, from where its last checkpoint left it.

    Raises:
        VoxError: a checkpoint is damaged, a step or a save failed, the disk is full. The last
            checkpoint is as it was; the error names it and says how to go on.
    """
    loop = _Loop(job, trainer)
    try:
        return await loop.run()
    except VoxError as error:
        raise loop.stopped(error) from error
    except OSError as error:
        raise loop.stopped(_unwritten(error, job.run.path)) from error
    finally:
        loop.close()


class _Loop:
    def __init__(self, job: Job, trainer: Trainer) -> None:
        self._job = job
        self._trainer = trainer
        self._pace = job.options.pace
        self._course = Course()
        self._at = 0
        """The step that is being taken, or that was taken last; 0: before the first."""
        self._saved: Checkpoint | None = None
        self._is_begun = False
        """Whether the worker goes on from where the run stands: before, no step was asked for."""
        self._published: int | None = None
        """Of which step the run's adapter is known to be."""
        self._checkpoints = Checkpoints(job.run.checkpoints)
        self._metrics: LineFile | None = None
        self._timings: LineFile | None = None

    async def run(self) -> Outcome:
        job, options = self._job, self._job.options
        self._checkpoints.tidy()
        self._saved = self._checkpoints.latest()
        if self._saved is not None:
            self._course = self._saved.state.course
            self._at = self._course.step
        self._metrics = LineFile(job.run.metrics, keep=self._saved.state.mark if self._saved else NOTHING)
        self._timings = LineFile(job.run.path / "timings.jsonl", is_durable=False)
        folder = None if self._saved is None else str(self._saved.folder)
        self._begun = await self._trainer.begin(
            options.begin(resume_dir=folder, devices=job.devices, remember_bytes=job.remember_bytes)
        )
        self._check_begun(self._begun)
        self._is_begun = True
        self._timings.append({"event": "begun", "step": self._course.step, "at": _now()})
        job.report.begun(self._begun, self._course)
        if self._saved is not None:
            # A kill may have come between a checkpoint and what follows from it.
            self._settle()
        elif job.held_out and not job.should_stop():
            await self._evaluate()
        while (ended := self._course.end(self._pace)) is None:
            if job.should_stop():
                if self._course.step > 0 and not self._is_saved:
                    await self._save()
                self._check_metrics()
                return Outcome(ended="interrupted", course=self._course, checkpoint=self._saved)
            await self._step()
            if job.held_out and self._pace.is_evaluation_due(self._course.step):
                await self._evaluate()
            is_best = self._course.best_step == self._course.step
            if is_best or self._course.end(self._pace) or self._pace.is_save_due(self._course.step):
                await self._save()
        self._check_metrics()
        return Outcome(ended=ended, course=self._course, checkpoint=self._saved)

    def close(self) -> None:
        for file in (self._metrics, self._timings):
            if file is not None:
                file.close()

    @property
    def _is_saved(self) -> bool:
        return self._saved is not None and self._saved.state.step == self._course.step

    def _check_begun(self, begun: t.TrainBeginResult) -> None:
        expected = (
            self._course.step,
            self._saved.state.adapter_digest if self._saved else begun.adapter_digest,
        )
        if (begun.step, begun.adapter_digest) != expected:
            raise IntegrityError(
                "resume-differs",
                "the worker did not go on from what the checkpoint holds; nothing was trained",
                facts=[
                    ("expected", f"step {expected[0]}, adapter sha256:{expected[1]}"),
                    ("found", f"step {begun.step}, adapter sha256:{begun.adapter_digest}"),
                ],
                remedy="`vox-host plugin check` says what is wrong with the plugin.",
            )

    async def _step(self) -> None:
        job, options = self._job, self._job.options
        self._at = self._course.step + 1
        epoch, indices = batch_of(
            self._course.step,
            examples=len(job.train),
            batch_size=options.batch_size,
            seed=options.seed,
            order=job.order,
        )
        examples = [job.train[index] for index in indices]
        started = time.monotonic()
        result = await self._trainer.step(examples)
        seconds = time.monotonic() - started
        self._course = self._course.stepped()
        tokens = sum(len(example.token_ids) for example in examples)
        self._line(
            {
                "step": result.step,
                "epoch": epoch,
                "loss": result.loss,
                "gradient_norm": result.gradient_norm,
                "learning_rate": result.learning_rate,
                "examples": len(examples),
                "trained_tokens": result.trained_tokens,
                "adapter_digest": result.adapter_digest,
            }
        )
        assert self._timings is not None
        self._timings.append(
            {"step": result.step, "seconds": round(seconds, 6), "tokens": tokens, "at": _now()}
        )
        job.report.stepped(StepSeen(result, epoch, tokens, seconds))

    async def _evaluate(self) -> None:
        held_out = self._job.held_out
        results: list[t.TrainEvaluateResult] = []
        for at in range(0, len(held_out), _AT_ONCE):
            results += await self._trainer.evaluate(held_out[at : at + _AT_ONCE])
        loss = mean_loss([Scored(result.loss, result.trained_tokens) for result in results])
        self._course = self._course.evaluated(loss)
        self._line(
            {
                "step": self._course.step,
                "held_out_loss": loss,
                "held_out_examples": len(results),
                "held_out_tokens": sum(result.trained_tokens for result in results),
                "best_step": self._course.best_step,
            }
        )
        self._job.report.evaluated(self._course, loss)

    async def _save(self) -> None:
        assert self._metrics is not None
        self._check_metrics()
        folder = self._checkpoints.make_room(self._course.step)
        saved = await self._trainer.save(str(folder))
        state = HostState.of(self._job.record, self._course, saved, self._metrics.mark)
        self._saved = self._checkpoints.complete(state)
        self._settle()
        self._job.report.saved(self._saved.folder)

    def _settle(self) -> None:
        """Bring what follows from the newest checkpoint up to it. Done twice, it changes nothing."""
        assert self._saved is not None
        best = self._course.best_step
        step = self._saved.state.step if best is None else best
        if step != self._published:
            chosen = self._saved if step == self._saved.state.step else self._checkpoints.read(step)
            self._job.publish(chosen, self._begun)
            self._published = step
        self._draw()
        self._checkpoints.keep_only(
            checkpoints_to_keep(self._checkpoints.steps(), self._pace, best=self._course.best_step)
        )

    def _draw(self) -> None:
        lines = read_lines(self._job.run.metrics)
        picture = loss_svg(
            [(line["step"], line["loss"]) for line in lines if "loss" in line],
            [(line["step"], line["held_out_loss"]) for line in lines if "held_out_loss" in line],
            title=self._job.title,
            best_step=self._course.best_step,
        )
        write_aside(self._job.run.loss_plot, picture.encode())

    def _check_metrics(self) -> None:
        # A checkpoint vouches for the lines before it: without a name they are lost at the end.
        assert self._metrics is not None
        self._metrics.check_in_place()

    def _line(self, facts: dict[str, object]) -> None:
        assert self._metrics is not None
        self._metrics.append(facts)

    def stopped(self, error: VoxError) -> VoxError:
        """Return the error with where the run stands and how it goes on."""
        saved, there, message = self._saved, self._checkpoints.steps(), error.message
        resume = f"`vox-host train --resume {quoted(self._job.run.path)}`"
        goes_on = f"{resume} goes on from " + (
            f"step {saved.state.step}." if saved else "the start: there is no checkpoint yet."
        )
        if error.code == "non-finite":
            if "not taken" not in message:
                # A step's own words say so; these are of the held-out rows.
                after = self._course.step + 1
                message += f"; the held-out rows were not scored, and step {after} was not taken"
            # The same step would fail the same way.
            goes_on = "A lower --learning-rate in a new run is the usual cure; resuming repeats the step."
        facts = list(error.facts)
        folder = self._job.run.path
        if self._is_begun and "step" not in dict(facts):
            facts.append(("step", self._at or "before the first"))
        if saved is None and there:
            # One that can't be read; which one it goes on from is the user's to say.
            facts.append(("checkpoints", [self._checkpoints.path(step).name for step in there]))
        else:
            facts.append(("last checkpoint", str(saved.folder) if saved else "none yet"))
        remedy = f"{error.remedy} {goes_on}" if error.remedy else goes_on
        if error.code in _NOT_WRITTEN:
            remedy = f"{what_helps(dict(facts).get('errno'))}, then {goes_on}"
            if not folder.is_dir():
                # Moved or removed while it was trained: no room would help.
                remedy = (
                    f"{folder} is no longer there: move it back, then {resume} goes on from its last "
                    "checkpoint; or give --resume the place where it is now."
                )
        elif error.code == "checkpoint-damaged":
            remedy = f"{error.remedy} Then: {resume}."
        again = VoxError(error.code, message, facts=facts, remedy=remedy)
        again.exit_code = error.exit_code
        return again


def _unwritten(error: OSError, folder: Path) -> UsageError:
    return UsageError(
        "run-not-written",
        f"{error.filename or folder} can't be written: {error.strerror or error}; the run was stopped, and "
        "its last checkpoint is whole",
        facts=[("errno", errno_name(error))],
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
