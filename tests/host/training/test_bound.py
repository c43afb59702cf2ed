"""run.json is what the run was begun as, or the run does not go on."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from fixtures.training_runs import a_record
from vox_host.errors import IntegrityError
from vox_host.quoted import quoted
from vox_host.training.bound import read_run_record
from vox_host.training.checkpoints import Checkpoints, HostState
from vox_host.training.metrics import NOTHING
from vox_host.training.pace import Course
from vox_host.training.record import record_digest, record_text
from vox_plugin_api.train_messages import TrainSaveResult


def a_run(folder: Path, *, steps: tuple[int, ...] = (2, 4)) -> Path:
    """What a run leaves that says what it is."""
    folder.mkdir()
    (folder / "run.json").write_text(record_text(a_record()))
    checkpoints = Checkpoints(folder / "checkpoints")
    checkpoints.tidy()
    for step in steps:
        checkpoints.make_room(step).mkdir()
        saved = TrainSaveResult(step=step, adapter_digest="ab" * 32, files={})
        checkpoints.complete(HostState.of(a_record(), Course(step=step), saved, NOTHING))
    return folder


def edit(run: Path, name: str, value: object, *, is_signed: bool = False) -> None:
    path = run / "run.json"
    fields = json.loads(path.read_text())
    *above, last = name.split(".")
    place = fields
    for part in above:
        place = place[part]
    place[last] = value
    path.write_text(json.dumps(fields))
    if is_signed:
        record = type(a_record()).model_validate({**fields, "record_digest": None})
        path.write_text(record_text(record))


def refusal(run: Path) -> IntegrityError:
    with pytest.raises(IntegrityError) as caught:
        read_run_record(run)
    return caught.value


def test_what_was_not_touched_is_taken_however_it_is_laid_out(tmp_path):
    run = a_run(tmp_path / "run")
    assert read_run_record(run) == a_record()
    (run / "run.json").write_text(json.dumps(json.loads((run / "run.json").read_text()), indent=7))
    assert read_run_record(run) == a_record()


EDITS = [
    ("options.rank", 4, 2), ("options.alpha", 400.0, 4.0), ("options.seed", 6, 5),
    ("options.learning_rate", -1.0, 0.01), ("options.dropout", 0.5, 0.1),
    ("options.rank_stabilised", True, False), ("options.batch_size", 1, 3), ("options.steps", 24, 12),
    ("options.weight_decay", 0.5, 0.0), ("options.keep_last", 9, 2), ("held_out", 0, 2),
    ("answers", "last", "all"), ("data.path", "/mine", "/rows.jsonl"), ("numerics.mode", "fast", "canonical"),
    ("options.alpha", "much", 4.0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "then"), EDITS)
def test_whatever_is_edited_is_named_with_what_was_and_what_is(tmp_path, name, value, then):
    run = a_run(tmp_path / "run")
    edit(run, name, value)
    error = refusal(run)
    facts = dict(error.facts)
    assert (error.code, error.exit_code) == ("run-changed", 4)
    assert f"{name} was changed; nothing was started" in error.message
    assert facts["expected"] == f"{name} {json.dumps(then)}"
    assert facts["found"] == f"{name} {json.dumps(value)}"
    assert f"`vox-host train --resume {quoted(run)}`" in error.remedy
    edit(run, name, then)
    assert read_run_record(run) == a_record()


@pytest.mark.parametrize("name", ["note", "options.note"])
def test_a_field_that_was_added_is_named_too(tmp_path, name):
    run = a_run(tmp_path / "run")
    edit(run, name, 1)
    error = refusal(run)
    assert f"{name} was changed; nothing was started" in error.message
    assert dict(error.facts)["expected"] == f'{name} "no such field"'


@pytest.mark.parametrize("name", ["answers", "template"])
def test_a_field_that_was_taken_away_is_named_whatever_it_held(tmp_path, name):
    run = a_run(tmp_path / "run")
    fields = json.loads((run / "run.json").read_text())
    held = fields.pop(name)
    (run / "run.json").write_text(json.dumps(fields))
    facts = dict(refusal(run).facts)
    assert (facts["expected"], facts["found"]) == (f"{name} {json.dumps(held)}", f'{name} "no such field"')


def test_an_edit_that_brings_its_own_digest_is_told_by_the_checkpoints(tmp_path):
    run = a_run(tmp_path / "run")
    edit(run, "options.alpha", 400.0, is_signed=True)
    facts = dict(refusal(run).facts)
    assert facts["expected"].startswith("options.alpha 4.0, record_digest ")
    assert facts["held against"].endswith("host.json")


def test_one_damaged_checkpoint_does_not_make_the_edit_believed(tmp_path):
    run = a_run(tmp_path / "run")
    (run / "checkpoints" / "step-000004" / "host.json").write_text("{}")
    edit(run, "options.alpha", 400.0, is_signed=True)
    assert "options.alpha" in refusal(run).message


@pytest.mark.parametrize(("name", "value"), [("options.alpha", 400.0), ("record_digest", None)])
def test_before_the_first_checkpoint_it_is_bound_by_its_own_digest(tmp_path, name, value):
    run = a_run(tmp_path / "run", steps=())
    assert read_run_record(run) == a_record()
    edit(run, name, value)
    error = refusal(run)
    assert (error.code, len(error.facts)) == ("run-changed", 2)
    assert f"sha256:{record_digest(a_record())}" in dict(error.facts).values()
    assert f"`vox-host train --resume {quoted(run)}`" in error.remedy


def test_a_run_of_an_older_vox_host_is_refused_and_told_why(tmp_path):
    run = a_run(tmp_path / "run")
    edit(run, "schema_version", 1)
    error = refusal(run)
    assert error.code == "run-older" and "can be used as before" in error.remedy


@pytest.mark.parametrize("how", ["folder", "content"])
@pytest.mark.parametrize("name", ["adapter_manifest.json", ".published", "loss.svg", "metrics.jsonl"])
def test_a_run_whose_checkpoints_are_gone_does_not_start_again_unasked(tmp_path, how, name):
    run = a_run(tmp_path / "a run")
    (run / name).write_text("of step 4")
    assert read_run_record(run) == a_record()
    shutil.rmtree(run / "checkpoints")
    if how == "content":
        (run / "checkpoints").mkdir()
    if (how, name) == ("content", "metrics.jsonl"):
        # Lines of before the first checkpoint: the run was stopped before it, and nothing is lost.
        assert read_run_record(run) == a_record()
        return
    error = refusal(run)
    assert (error.code, error.exit_code) == ("checkpoints-missing", 4)
    assert dict(error.facts)["found"] == [name]
    assert str(run / "checkpoints") in error.message
    command = error.remedy.rpartition("from the start: `")[2].partition("`")[0]
    assert shlex.split(command) == ["rm", "-r", str(run / name)]
    subprocess.run(shlex.split(command), check=True)
    assert read_run_record(run) == a_record()
