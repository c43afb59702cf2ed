"""The loop: what a run leaves follows from its options and its data, whatever ends it on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fixtures.training_runs import (
    InProcessTrainer,
    Watched,
    a_job,
    a_model,
    a_record,
    kill_often,
    results,
    run_to_end,
    some_options,
)
from vox_host.errors import UsageError, VoxError, WorkerFailedError
from vox_host.runs.layout import RunDirectory
from vox_host.runs.manifest import parse_manifest
from vox_host.training import drive as drive_module
from vox_host.training.bound import read_run_record
from vox_host.training.checkpoints import Checkpoints
from vox_host.training.metrics import read_lines
from vox_host.training.record import record_text

KILLS = 20
LONG = some_options(steps=24, save_every=2, eval_every=3, keep_last=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return a_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def whole(fast_path, model) -> Path:
    """A run that was never stopped."""
    run_to_end(a_job(fast_path / "whole", model), model)
    return fast_path / "whole"


def reached(watched: Watched, step: int) -> bool:
    return bool(watched.steps) and watched.steps[-1] >= step


def published_step(folder: Path) -> int:
    path = RunDirectory(folder).adapter_manifest
    return parse_manifest(path.read_bytes(), path).step


def test_a_run_leaves_its_adapter_metrics_plot_and_the_checkpoints_that_are_kept(whole):
    lines = read_lines(whole / "metrics.jsonl")
    assert [line["step"] for line in lines if "loss" in line] == list(range(1, 13))
    evaluations = {line["step"]: line["held_out_loss"] for line in lines if "held_out_loss" in line}
    assert list(evaluations) == [0, 3, 6, 9, 12]
    best = min((loss, step) for step, loss in evaluations.items() if step)[1]
    assert published_step(whole) == best
    kept = {path.name for path in (whole / "checkpoints").iterdir()}
    # Whoever goes on from step 10 goes on from what was the best then, too.
    best_then = min((loss, step) for step, loss in evaluations.items() if 0 < step <= 10)[1]
    assert kept == {f"step-{step:06d}" for step in {10, 12, best, best_then}}
    assert (whole / "adapter_model.safetensors").read_bytes() == (
        whole / "checkpoints" / f"step-{best:06d}" / "adapter.safetensors"
    ).read_bytes()
    assert (whole / "loss.svg").read_text().count("<polyline") == 2
    # What tells the hour is elsewhere.
    assert "seconds" not in (whole / "metrics.jsonl").read_text()
    assert sum("seconds" in line for line in read_lines(whole / "timings.jsonl")) == 12


def test_a_run_that_is_killed_twenty_times_leaves_the_bytes_of_one_that_was_not(fast_path, model):
    run_to_end(a_job(fast_path / "whole", model, LONG), model)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    script = Path(sys.modules[kill_often.__module__].__file__)
    # In a process of its own: this one has threads, and a fork of it would not be like a fresh process.
    done = subprocess.run(
        [
            sys.executable,
            str(script),
            str(fast_path / "killed"),
            str(model),
            LONG.model_dump_json(),
            str(KILLS),
            "7",
        ],
        env={**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    deaths = json.loads(done.stdout)
    assert len(deaths) == KILLS
    assert len({steps for steps, _ in deaths}) > KILLS // 4, f"they all died at the same place: {deaths}"
    assert results(fast_path / "killed") == results(fast_path / "whole")


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bytes(fast_path, model, whole):
    folder = fast_path / "stopped"
    for stop_after in (1, 5, 8):
        watched = Watched()
        job = a_job(
            folder,
            model,
            report=watched,
            should_stop=lambda n=stop_after, w=watched: bool(w.steps) and w.steps[-1] >= n,
        )
        outcome = run_to_end(job, model)
        assert outcome.ended == "interrupted"
        assert outcome.checkpoint is not None and outcome.checkpoint.state.step == stop_after
        # A reader finds an adapter at every stop.
        assert published_step(folder) <= stop_after
    assert run_to_end(a_job(folder, model), model).ended == "steps"
    assert results(folder) == results(whole)


def test_a_run_begins_with_the_memory_that_was_planned(fast_path, model):
    begun = []

    class Told(InProcessTrainer):
        async def begin(self, params):
            begun.append(params)
            return await super().begin(params)

    for until in (2, 4):
        watched = Watched()
        stop = partial(reached, watched, until)
        job = a_job(fast_path / "run", model, report=watched, should_stop=stop)
        asyncio.run(drive_module.drive(dataclasses.replace(job, remember_bytes=123), Told(model)))
    assert [params.remember_bytes for params in begun] == [123, 123]
    assert begun[1].resume_dir is not None


def test_a_stop_before_the_first_step_saves_nothing_and_the_run_begins_anew(fast_path, model, whole):
    folder = fast_path / "early"
    outcome = run_to_end(a_job(folder, model, should_stop=lambda: True), model)
    assert (outcome.ended, outcome.checkpoint) == ("interrupted", None)
    run_to_end(a_job(folder, model), model)
    assert results(folder) == results(whole)


def test_a_finished_run_that_is_resumed_trains_nothing_and_mends_what_was_not_published(
    fast_path, model, whole
):
    before = results(whole)
    (whole / "adapter_manifest.json").unlink()
    (whole / "loss.svg").unlink()
    watched = Watched()
    assert run_to_end(a_job(whole, model, report=watched), model).ended == "steps"
    assert watched.steps == []
    assert results(whole) == before


def test_early_stopping_ends_a_run_and_a_resumed_one_at_the_same_step(fast_path, model):
    options = some_options(steps=30, learning_rate=3.0, eval_every=1, save_every=4, patience=2)
    outcome = run_to_end(a_job(fast_path / "one", model, options), model)
    assert outcome.ended == "patience"
    assert outcome.course.step == outcome.course.best_step + 2 < 30
    watched = Watched()
    job = a_job(fast_path / "two", model, options, report=watched, should_stop=partial(reached, watched, 2))
    run_to_end(job, model)
    assert run_to_end(a_job(fast_path / "two", model, options), model).ended == "patience"
    assert results(fast_path / "two") == results(fast_path / "one")


def test_without_held_out_rows_the_newest_adapter_is_published(fast_path, model):
    outcome = run_to_end(a_job(fast_path / "run", model, some_options(steps=5), held_out=()), model)
    assert outcome.course.best_step is None
    assert published_step(fast_path / "run") == 5


def test_the_held_out_loss_is_that_of_the_tokens_however_it_was_cut(fast_path, model, monkeypatch):
    rows = a_job(fast_path / "rows", model).train
    found = []
    for at_once in (1, 3, 32):
        monkeypatch.setattr(drive_module, "_AT_ONCE", at_once)
        watched = Watched()
        job = a_job(
            fast_path / str(at_once),
            model,
            some_options(steps=1, warmup_steps=0),
            held_out=rows,
            report=watched,
        )
        run_to_end(job, model)
        found.append(watched.losses)
    assert len(found[0]) == 2
    assert found[0] == found[1] == found[2]


class Failing(InProcessTrainer):
    """A trainer whose worker answers the n-th step, or the n-th save, with an error."""

    def __init__(self, model: Path, error: VoxError, *, at_step: int) -> None:
        super().__init__(model)
        self._error, self._left = error, at_step

    async def step(self, examples):
        self._left -= 1
        if self._left == 0:
            raise self._error
        return await super().step(examples)


def stopped_by(job, trainer) -> VoxError:
    with pytest.raises(VoxError) as caught:
        asyncio.run(drive_module.drive(job, trainer))
    return caught.value


def test_a_worker_that_dies_stops_the_run_and_the_error_says_how_it_goes_on(fast_path, model, whole):
    folder = fast_path / "run"
    died = WorkerFailedError(
        "worker-died", "it died", facts=[("exit", "signal 9")], remedy="Look at its log."
    )
    error = stopped_by(a_job(folder, model), Failing(model, died, at_step=6))
    assert (error.code, error.exit_code) == ("worker-died", 5)
    facts = dict(error.facts)
    assert (facts["exit"], facts["step"]) == ("signal 9", 6)
    assert facts["last checkpoint"] == str(folder / "checkpoints" / "step-000004")
    assert error.remedy == f"Look at its log. `vox-host train --resume {folder}` goes on from step 4."
    run_to_end(a_job(folder, model), model)
    assert results(folder) == results(whole)


def test_a_loss_that_is_not_finite_stops_with_step_layer_and_the_last_good_checkpoint(fast_path, model):
    # The first steps are small; then one throws the adapter out of what float32 holds.
    options = some_options(learning_rate=1e20, warmup_steps=0, max_gradient_norm=None, save_every=1)
    folder = fast_path / "run"
    error = stopped_by(a_job(folder, model, options), InProcessTrainer(model, is_native=True))
    assert (error.code, error.exit_code) == ("non-finite", 5)
    facts = dict(error.facts)
    taken = [line["step"] for line in read_lines(folder / "metrics.jsonl") if "loss" in line]
    assert facts["step"] == len(taken) + 1 > 1
    assert "layers.0" in facts["operator"]
    assert facts["last checkpoint"] == str(folder / "checkpoints" / f"step-{len(taken):06d}")
    assert "--learning-rate" in error.remedy and "--resume" not in error.remedy


@pytest.mark.parametrize("size", [1_000, 2_100, 4_200], ids=["metrics", "adapter", "moments"])
def test_a_full_disk_stops_the_run_with_the_last_checkpoint_whole(fast_path, model, whole, size):
    folder = fast_path / "run"
    watched = Watched()
    run_to_end(a_job(folder, model, report=watched, should_stop=partial(reached, watched, 4)), model)
    before = results(folder / "checkpoints" / "step-000004")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # No file may become larger than this: to whoever writes one, the disk is full.
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        error = stopped_by(a_job(folder, model), InProcessTrainer(model))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert results(folder / "checkpoints" / "step-000004") == before
    assert "File too large" in error.message
    assert error.exit_code == 2
    assert dict(error.facts)["last checkpoint"].endswith("step-000004")
    # What the worker says of a save is for one that goes on, and this run has ended.
    larger = "Allow larger files (`ulimit -f`, or another file system)"
    assert error.remedy == f"{larger}, then `vox-host train --resume {folder}` goes on from step 4."
    run_to_end(a_job(folder, model), model)
    assert results(folder) == results(whole)


@pytest.mark.parametrize(
    ("code", "errno", "helps"),
    [
        ("save-failed", "ENOSPC", "Make room"),
        ("publish-failed", "EDQUOT", "Make room within your quota"),
        ("publish-unfinished", "EROFS", "Make that file system writable"),
        ("save-failed", "EACCES", "Allow this user to write there"),
        # Of a plugin that names no error of the system's.
        ("save-failed", None, "See to what the system said"),
    ],
)
def test_whatever_can_not_be_written_the_run_s_last_words_are_of_a_run_that_has_ended(
    fast_path, model, code, errno, helps
):
    full = UsageError(
        code,
        "it can't be written",
        facts=[("errno", errno)] if errno else [],
        remedy="Save again: the training goes on meanwhile.",
    )
    error = stopped_by(a_job(fast_path / "run", model), Failing(model, full, at_step=6))
    assert error.remedy == f"{helps}, then `vox-host train --resume {fast_path / 'run'}` goes on from step 4."


@pytest.mark.parametrize(
    ("code", "helps"), [(30, "Make that file system writable"), (36, "Use a shorter name")]
)
def test_a_run_s_own_files_that_can_not_be_written_are_told_in_the_system_s_words(
    fast_path, model, code, helps, monkeypatch
):
    def refuse(path, content):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(drive_module, "write_aside", refuse)
    said = stopped_by(a_job(fast_path / "run", model), InProcessTrainer(model))
    assert said.code == "run-not-written" and os.strerror(code) in said.message
    assert said.remedy.startswith(f"{helps}, then `vox-host train --resume") and "room" not in said.remedy


def damaged_run(folder: Path, model: Path) -> Checkpoints:
    """A finished run of which every other checkpoint is the best of its time."""
    run_to_end(a_job(folder, model, some_options(eval_every=1, save_every=1, keep_last=3)), model)
    return Checkpoints(folder / "checkpoints")


def flip(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


def test_a_damaged_newest_checkpoint_is_told_with_those_that_are_there_and_nothing_was_begun(
    fast_path, model
):
    folder = fast_path / "run"
    checkpoints = damaged_run(folder, model)
    there = checkpoints.steps()
    before = results(folder)
    for file in ("optimizer.safetensors", "host.json"):
        content = (checkpoints.path(there[-1]) / file).read_bytes()
        flip(checkpoints.path(there[-1]) / file)
        error = stopped_by(a_job(folder, model), InProcessTrainer(model))
        (checkpoints.path(there[-1]) / file).write_bytes(content)
        facts = dict(error.facts)
        assert (error.code, error.exit_code) == ("checkpoint-damaged", 4)
        assert facts["checkpoints"] == [f"step-{step:06d}" for step in there] and len(there) > 2
        assert "step" not in facts and "last checkpoint" not in facts
        assert error.remedy == (
            f"`rm -r {checkpoints.path(there[-1])}`, and the run goes on from the checkpoint before it, "
            f"step {there[-2]}. Then: `vox-host train --resume {folder}`."
        )
        assert "nothing was trained" in error.message
    assert results(folder) == before


def test_what_is_said_of_a_damaged_checkpoint_brings_the_run_to_its_end(fast_path, model):
    """Whichever it is: the best one is needed by those after it."""
    run_to_end(a_job(fast_path / "whole", model), model)
    for at, _ in enumerate(Checkpoints(fast_path / "whole" / "checkpoints").steps()):
        folder = fast_path / f"run-{at}"
        shutil.copytree(fast_path / "whole", folder)
        checkpoints = Checkpoints(folder / "checkpoints")
        flip(checkpoints.path(checkpoints.steps()[at]) / "adapter.safetensors")
        (folder / "run.json").write_text(record_text(a_record()))
        for _ in range(len(checkpoints.steps()) + 1):
            try:
                # As the command does first.
                read_run_record(folder)
                run_to_end(a_job(folder, model), model)
                break
            except VoxError as error:
                assert error.code == "checkpoint-damaged"
                said = error.remedy
            for path in shlex.split(said.split("`")[1])[2:]:
                shutil.rmtree(path) if Path(path).is_dir() else Path(path).unlink()
        else:
            raise AssertionError(said)
        assert (folder / "adapter_model.safetensors").read_bytes() == (
            fast_path / "whole" / "adapter_model.safetensors"
        ).read_bytes()


def test_a_worker_that_dies_before_the_first_step_has_no_step_to_name(fast_path, model):
    class Dying(InProcessTrainer):
        async def begin(self, params):
            raise WorkerFailedError("worker-died", "it died")

    error = stopped_by(a_job(fast_path / "run", model), Dying(model))
    assert dict(error.facts) == {"last checkpoint": "none yet"}
    assert error.remedy.endswith("goes on from the start: there is no checkpoint yet.")


def test_a_checkpoint_of_another_adapter_is_not_gone_on_from(fast_path, model):
    folder = fast_path / "run"
    watched = Watched()
    run_to_end(a_job(folder, model, report=watched, should_stop=partial(reached, watched, 2)), model)
    checkpoints = Checkpoints(folder / "checkpoints")
    state = checkpoints.read(2).state
    digest = state.adapter_digest
    checkpoints.complete(state.model_copy(update={"adapter_digest": "0" * 64}))
    error = stopped_by(a_job(folder, model), InProcessTrainer(model))
    assert error.code == "resume-differs"
    facts = dict(error.facts)
    assert (facts["expected"], facts["found"]) == (
        f"step 2, adapter sha256:{'0' * 64}",
        f"step 2, adapter sha256:{digest}",
    )


class FailingSaves(InProcessTrainer):
    """Fails at each save after the first."""

    async def save(self, folder):
        if self.saves:
            raise UsageError("save-failed", "it can't be written")
        self.saves += 1
        return await super().save(folder)

    saves = 0


def test_a_save_that_fails_names_the_step_that_was_to_be_saved(fast_path, model):
    folder = fast_path / "run"
    error = stopped_by(a_job(folder, model, some_options(save_every=1)), FailingSaves(model))
    taken = read_lines(folder / "metrics.jsonl")[-1]["step"]
    assert dict(error.facts)["step"] == taken == 2


def test_a_run_whose_folder_is_moved_away_is_told_so_and_not_to_make_room(fast_path, model, whole):
    folder, elsewhere = fast_path / "run", fast_path / "moved"

    class Moving(Watched):
        def stepped(self, seen):
            super().stepped(seen)
            if seen.result.step == 5:
                folder.rename(elsewhere)

    error = stopped_by(a_job(folder, model, report=Moving()), InProcessTrainer(model))
    assert "Make room" not in error.remedy
    assert f"{folder} is no longer there" in error.remedy and "--resume" in error.remedy
    run_to_end(a_job(elsewhere, model), model)
    assert results(elsewhere) == results(whole)


@pytest.mark.parametrize("step", [1, 5, 12])
@pytest.mark.parametrize("other", [None, b"of another program\n"])
def test_metrics_that_are_removed_or_replaced_stop_the_run_and_are_kept(fast_path, model, whole, other, step):
    folder = fast_path / "run"
    metrics = folder / "metrics.jsonl"

    def lose(now: int) -> None:
        if now == step:
            metrics.unlink()
            if other is not None:
                metrics.write_bytes(other)

    error = stopped_by(a_job(folder, model, report=Watched(lose)), InProcessTrainer(model))
    assert (error.code, error.exit_code) == ("metrics-changed", 4)
    assert dict(error.facts)["found"] == ("no such file" if other is None else "another file")
    assert f"`vox-host train --resume {folder}` goes on from" in error.remedy
    if other is not None:
        # Not ours to write over: what is said of it is done.
        assert metrics.read_bytes() == other
        kept = folder / "metrics.jsonl.written"
        assert f"{kept}: move that to {metrics}." in error.remedy
        kept.replace(metrics)
    assert {line["step"] for line in read_lines(metrics)} >= {1, step}
    run_to_end(a_job(folder, model), model)
    assert results(folder) == results(whole)


def test_metrics_that_vanish_after_the_last_checkpoint_are_missed_at_the_end(fast_path, model, whole):
    folder = fast_path / "run"

    class Removing(Watched):
        def saved(self, folder):
            super().saved(folder)
            if folder.name == "step-000012":
                (folder.parents[1] / "metrics.jsonl").unlink()

    error = stopped_by(a_job(folder, model, report=Removing()), InProcessTrainer(model))
    assert error.code == "metrics-changed" and "were put back" in error.remedy
    assert results(folder) == results(whole)


def test_metrics_that_were_cut_meanwhile_stop_the_run(fast_path, model):
    folder = fast_path / "run"

    def cut(now: int) -> None:
        if now == 5:
            os.truncate(folder / "metrics.jsonl", 3)

    error = stopped_by(a_job(folder, model, report=Watched(cut)), InProcessTrainer(model))
    # The lines of steps that came after the cut are behind it.
    assert error.code == "metrics-changed" and "the run was stopped" in error.message
    assert dict(error.facts)["found"] == f"{(folder / 'metrics.jsonl').stat().st_size} bytes"
    assert "lines are lost: begin a new run" in error.remedy


def test_held_out_rows_that_are_not_finite_say_that_no_step_was_taken(fast_path, model):
    class Infinite(InProcessTrainer):
        async def evaluate(self, examples):
            raise WorkerFailedError("non-finite", "layers.0.mlp.down_proj is not finite")

    error = stopped_by(a_job(fast_path / "run", model), Infinite(model))
    assert error.message.endswith("the held-out rows were not scored, and step 1 was not taken")
    assert dict(error.facts)["step"] == "before the first"
