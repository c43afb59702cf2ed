"""A finished run is told so before anything is loaded; one of which anything is left is not."""

from __future__ import annotations

import os
import shutil

import pytest

from fixtures.training_runs import a_job, a_model, a_record, results, run_to_end, some_options
from vox_host.errors import IntegrityError
from vox_host.runs.layout import RunDirectory
from vox_host.runs.manifest import BaseModelRecord
from vox_host.training.finished import finished


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return a_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def whole(fast_path, model):
    run_to_end(a_job(fast_path / "whole", model), model)
    return fast_path / "whole"


def left(folder, model, record=None, *, name="tiny"):
    base = BaseModelRecord(name=name, digest="cd" * 32, path=str(model))
    return finished(RunDirectory(folder), record or a_record(), base)


def test_a_finished_run_is_known_and_left_alone(whole, model):
    before = results(whole)
    outcome = left(whole, model)
    assert outcome is not None and outcome.ended == "steps"
    assert outcome.course.step == a_record().options.steps == outcome.checkpoint.state.step
    assert results(whole) == before


@pytest.mark.parametrize("how", ["patience", "nothing held out"])
def test_however_it_ended(fast_path, model, how):
    if how == "patience":
        options = some_options(steps=30, learning_rate=3.0, eval_every=1, save_every=4, patience=2)
        run_to_end(a_job(fast_path / "run", model, options), model)
    else:
        options = some_options(steps=5)
        run_to_end(a_job(fast_path / "run", model, options, held_out=()), model)
    outcome = left(fast_path / "run", model, a_record(options))
    assert outcome is not None and outcome.ended == ("patience" if how == "patience" else "steps")


def unlink(name):
    return lambda run: (run / name).unlink()


def half_published(run):
    """Whole, and not yet in its place: readers take it from there, other software does not."""
    (run / ".published").mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json", "adapter_manifest.json"):
        shutil.copy(run / name, run / ".published" / name)


@pytest.mark.parametrize(
    "spoil",
    [
        unlink("adapter_manifest.json"),
        unlink("loss.svg"),
        unlink("metrics.jsonl"),
        lambda run: (run / "adapter_model.safetensors").write_bytes(b"other"),
        lambda run: (run / "metrics.jsonl").write_bytes((run / "metrics.jsonl").read_bytes() + b"{}\n"),
        half_published,
        lambda run: (run / "checkpoints" / ".step-000001.gone").mkdir(),
        lambda run: os.rename(run / "checkpoints", run / "moved"),
    ],
)
def test_what_is_left_to_do_is_done_with_the_model(whole, model, spoil):
    spoil(whole)
    assert left(whole, model) is None


def test_a_run_that_goes_on_or_was_published_as_another_is_not_finished(fast_path, model, whole):
    run_to_end(a_job(fast_path / "early", model, should_stop=lambda: True), model)
    assert left(fast_path / "early", model) is None
    assert left(whole, model, a_record(some_options(steps=99))) is None
    other = a_record().model_copy(update={"held_out": 3})
    assert left(whole, model, other) is None
    assert left(whole, model, name="renamed") is None


def test_a_damaged_checkpoint_is_told(whole, model):
    newest = max((whole / "checkpoints").iterdir())
    (newest / "optimizer.safetensors").write_bytes(b"other")
    with pytest.raises(IntegrityError):
        left(whole, model)
