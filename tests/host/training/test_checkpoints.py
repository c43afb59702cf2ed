"""Checkpoints: whole or not there, kept or gone, never taken for what they are not."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from fixtures.training_runs import a_record
from vox_host.errors import IntegrityError, UsageError
from vox_host.runs.inside import refuse_inside_run
from vox_host.training.bound import read_run_record
from vox_host.training.checkpoints import Checkpoints, HostState
from vox_host.training.lock import held_run
from vox_host.training.metrics import NOTHING
from vox_host.training.pace import Course
from vox_plugin_api.train_messages import TrainSaveResult

CONTENT = b"of the worker"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


def save(checkpoints: Checkpoints, step: int) -> None:
    folder = checkpoints.make_room(step)
    folder.mkdir()
    (folder / "state.json").write_bytes(CONTENT)
    saved = TrainSaveResult(step=step, adapter_digest="ab" * 32, files={"state.json": DIGEST})
    checkpoints.complete(
        HostState.of(a_record(), Course(step=step, best_loss=0.25, best_step=1), saved, NOTHING)
    )


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    made = Checkpoints(tmp_path / "checkpoints")
    assert made.latest() is None
    made.tidy()
    for step in (9, 10, 11):
        save(made, step)
    return made


def test_the_newest_is_found_by_its_number_and_says_where_the_run_was(checkpoints):
    save(checkpoints, 1_000_000)
    latest = checkpoints.latest()
    assert latest is not None and latest.folder.name == "step-1000000"
    assert latest.state.course == Course(step=1_000_000, best_loss=0.25, best_step=1)
    assert checkpoints.steps() == [9, 10, 11, 1_000_000]


def test_what_a_kill_left_half_done_is_no_checkpoint_and_goes(checkpoints):
    half = checkpoints.make_room(12)
    half.mkdir()
    (half / "state.json").write_bytes(CONTENT)
    (checkpoints.folder / ".step-000012.partial").mkdir()
    going = checkpoints.path(11).rename(checkpoints.folder / ".step-000011.gone")
    (going / "state.json").unlink()
    (checkpoints.folder / ".step-000008.gone").mkdir()
    assert checkpoints.latest().folder == checkpoints.path(10)
    checkpoints.tidy()
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-000009", "step-000010"]


def test_one_that_was_completed_just_before_a_kill_stays(checkpoints):
    save(checkpoints, 12)
    (checkpoints.folder / ".step-000012.saving").mkdir()
    checkpoints.tidy()
    assert checkpoints.steps() == [9, 10, 11, 12]
    assert not (checkpoints.folder / ".step-000012.saving").exists()


def test_what_others_put_there_is_neither_counted_nor_removed(checkpoints):
    for name in ("step-000011-keep", "step-000011.bak", "best", "step-1", "step-0000011", "step-000777"):
        (checkpoints.folder / name).mkdir()
        (checkpoints.folder / name / "mine.txt").write_text("mine")
        if name not in ("best", "step-000777"):
            (checkpoints.folder / name / "host.json").write_bytes(
                (checkpoints.path(11) / "host.json").read_bytes()
            )
    (checkpoints.folder / "notes.txt").write_text("mine")
    (checkpoints.folder / "step-000778").symlink_to(checkpoints.path(11))
    (checkpoints.folder / ".step-000779.gone").mkdir()
    (checkpoints.folder / ".step-000779.gone" / "mine.txt").write_text("mine")
    before = {path.name for path in checkpoints.folder.iterdir()}
    checkpoints.tidy()
    assert {path.name for path in checkpoints.folder.iterdir()} == before
    assert checkpoints.steps() == [9, 10, 11]
    checkpoints.keep_only({11})
    assert {path.name for path in checkpoints.folder.iterdir()} == before - {"step-000009", "step-000010"}
    assert len(list(checkpoints.folder.rglob("mine.txt"))) == 7


@pytest.mark.parametrize("is_link", [False, True])
def test_a_checkpoint_is_not_written_over_what_no_run_wrote(checkpoints, tmp_path, is_link):
    place = checkpoints.path(777)
    if is_link:
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        (place / "mine.txt").write_text("mine")
    with pytest.raises(UsageError, match="step-000777") as caught:
        checkpoints.make_room(777)
    assert caught.value.code == "checkpoint-place-taken"
    checkpoints.tidy()
    assert place.is_symlink() if is_link else (place / "mine.txt").read_text() == "mine"


def test_a_copy_under_the_name_of_another_step_is_not_taken_for_it(checkpoints):
    shutil.copytree(checkpoints.path(11), checkpoints.path(99))
    with pytest.raises(IntegrityError, match="step-000099") as caught:
        checkpoints.latest()
    assert dict(caught.value.facts)["found"] == "that of step 11"


def test_a_damaged_one_is_refused_and_no_older_one_taken_in_its_place(checkpoints):
    (checkpoints.path(11) / "state.json").write_bytes(b"other")
    with pytest.raises(IntegrityError) as caught:
        checkpoints.latest()
    facts = dict(caught.value.facts)
    assert facts["expected"] == f"sha256:{DIGEST}"
    assert facts["found"] == f"sha256:{hashlib.sha256(b'other').hexdigest()}"
    assert str(checkpoints.path(11)) in caught.value.remedy
    (checkpoints.path(11) / "host.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"host\.json") as caught:
        checkpoints.latest()
    found = dict(caught.value.facts)["found"]
    assert "None" not in found and "validation error" not in found and "HostState" not in found
    assert "Field required" in found and ": " in found


def test_a_record_without_its_digest_says_so(checkpoints):
    path = checkpoints.path(11) / "host.json"
    fields = json.loads(path.read_text())
    fields["record_digest"] = None
    path.write_text(json.dumps(fields))
    with pytest.raises(IntegrityError) as caught:
        checkpoints.latest()
    assert dict(caught.value.facts)["found"] == "no digest of its own"


def test_what_came_after_a_damaged_one_goes_with_it_and_the_one_before_is_named(checkpoints):
    (checkpoints.path(10) / "state.json").write_bytes(b"other")
    with pytest.raises(IntegrityError) as caught:
        checkpoints.read(10)
    gone = f"{checkpoints.path(10)} {checkpoints.path(11)}"
    assert (
        caught.value.remedy == f"`rm -r {gone}`, and the run goes on from the checkpoint before it, step 9."
    )
    (checkpoints.path(9) / "state.json").write_bytes(b"other")
    with pytest.raises(IntegrityError, match="step-000009") as caught:
        checkpoints.read(9)
    assert caught.value.remedy.endswith("the start: none is before it.")
    # What was published of them would be in the way of a start.
    manifest = checkpoints.folder.parent / "adapter_manifest.json"
    manifest.touch()
    with pytest.raises(IntegrityError, match="step-000009") as caught:
        checkpoints.read(9)
    assert f"{checkpoints.path(11)} {manifest}`" in caught.value.remedy


@pytest.mark.parametrize("field", ["best_step", "metrics_sha256", "without_gain", "record_digest"])
def test_a_changed_record_is_no_checkpoint(checkpoints, field):
    path = checkpoints.path(11) / "host.json"
    fields = json.loads(path.read_text())
    fields[field] = "0" * 64 if isinstance(fields[field], str) else 4
    path.write_text(json.dumps(fields, indent=2) + "\n")
    with pytest.raises(IntegrityError, match=r"host\.json is not what the run wrote"):
        checkpoints.latest()


def test_the_best_of_a_kept_one_is_kept_with_it(checkpoints):
    state = checkpoints.read(11).state
    checkpoints.complete(state.model_copy(update={"best_step": 9}))
    checkpoints.keep_only({11})
    assert checkpoints.steps() == [9, 11]


def test_one_whose_record_can_not_be_read_keeps_nothing_and_stops_nothing(checkpoints):
    (checkpoints.path(11) / "host.json").write_text("{}")
    checkpoints.keep_only({11})
    assert checkpoints.steps() == [11]


def test_a_pipe_in_the_place_of_a_file_is_damage_and_not_waited_for(checkpoints):
    (checkpoints.path(11) / "state.json").unlink()
    os.mkfifo(checkpoints.path(11) / "state.json")
    with pytest.raises(IntegrityError, match="step-000011") as caught:
        checkpoints.latest()
    assert dict(caught.value.facts)["found"] == "no plain file"


def test_only_those_that_are_to_be_kept_stay(checkpoints):
    checkpoints.keep_only({9, 11})
    assert checkpoints.steps() == [9, 11]
    assert checkpoints.make_room(9) == checkpoints.path(9)
    assert not checkpoints.path(9).exists()


def test_the_newest_without_its_record_is_damaged_and_one_being_saved_is_not(checkpoints):
    (checkpoints.path(11) / "adapter.safetensors").write_bytes(b"x")
    (checkpoints.path(11) / "host.json").unlink()
    with pytest.raises(IntegrityError, match=r"step-000011/host\.json is not what the run wrote") as caught:
        checkpoints.latest()
    assert (caught.value.exit_code, dict(caught.value.facts)["found"]) == (4, "no such file")
    assert "goes on from the checkpoint before it, step 10" in caught.value.remedy
    mark = checkpoints.folder / ".step-000011.saving"
    mark.mkdir()
    assert checkpoints.latest().state.step == 10


def test_a_folder_in_the_lock_s_place_is_named_with_the_way_out(tmp_path):
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UsageError, match=r"\.lock is a folder") as caught, held_run(tmp_path):
        pass
    assert caught.value.code == "run-lock" and f"mv {tmp_path}/.lock" in caught.value.remedy


def test_a_run_without_its_record_is_not_sent_where_it_would_be_refused(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UsageError, match=r"run\.json is missing") as caught:
        read_run_record(tmp_path)
    assert "Bring back the run.json of then" in caught.value.remedy and "--out NEW" in caught.value.remedy


def test_nothing_is_made_within_a_run(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UsageError, match="which is a run; nothing was written"):
        refuse_inside_run(tmp_path / "a" / "b", "nothing was written")
    refuse_inside_run(tmp_path.parent / "b", "nothing was written")
