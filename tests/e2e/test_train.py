"""`vox-host train` through the real command line and a real worker, on a tiny model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from fixtures.fast_folder import fast_folder
from fixtures.installed_lane import InstalledLane
from fixtures.runs import a_checkpoint
from fixtures.scripted_home import MACHINE
from fixtures.training_home import MODEL, PLUGIN, begun, training_home, write_rows
from fixtures.training_runs import results
from mens_core.adapters.file import safetensors_bytes
from mens_core.adapters.keys import adapter_digest
from vox_host import cli
from vox_host.errors import IntegrityError
from vox_host.hardware.record import Machine
from vox_host.runs.layout import RunDirectory
from vox_host.runs.manifest import AdapterFacts
from vox_host.runs.open import open_adapter, read_verified
from vox_host.runs.publish import publish_adapter
from vox_host.training.checkpoints import Checkpoints
from vox_host.training.record import RunRecord, record_text

OPTIONS = ("--steps", "30", "--save-every", "2", "--eval-every", "5", "--batch-size", "2", "--rank", "2")
NEW = ("--model", MODEL, "--data", "ROWS", "--out", "NEW")
OPTIONS = (*OPTIONS, "--targets", "q_proj,down_proj,embed_tokens", "--dropout", "0.1", "--seed", "3")


@pytest.fixture(scope="module")
def lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InstalledLane]:
    with fast_folder(tmp_path_factory.mktemp("train")) as folder:
        yield training_home(folder / "home")


@pytest.fixture(scope="module")
def whole(lane: InstalledLane) -> Path:
    """A run that was never stopped, begun on the command line."""
    done = train(lane, *new_run(lane, "whole/tools"), "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert (facts["ended"], facts["step"], facts["steps"]) == ("steps", 30, 30)
    assert facts["best_held_out_loss"] < facts["held_out_loss_before"]
    # The estimate is an upper bound, and not a wild one.
    assert facts["peak_memory_bytes"] < facts["estimated_memory_bytes"] < 20 * facts["peak_memory_bytes"]
    return lane.home / "whole" / "tools"


def new_run(lane: InstalledLane, name: str, *options: str) -> list[str]:
    return [
        *("--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--out", str(lane.home / name)),
        *(options or OPTIONS),
    ]


def train(lane: InstalledLane, *arguments: str) -> subprocess.CompletedProcess[str]:
    return lane.run("train", *arguments)


def begun_as(run: Path, **changes: object) -> None:
    """Make it a run that was begun as something else, its checkpoints too."""
    fields = json.loads((run / "run.json").read_text())
    record = RunRecord.model_validate({**fields, **changes, "record_digest": None})
    (run / "run.json").write_text(record_text(record))
    checkpoints = Checkpoints(run / "checkpoints")
    for step in checkpoints.steps():
        checkpoints.complete(checkpoints.read(step).state.model_copy(update={"run": record}))


def worker_of(process: subprocess.Popen[str]) -> psutil.Process:
    children = psutil.Process(process.pid).children()
    return next(child for child in children if "vox_plugin_api.child" in child.cmdline())


def refused(
    lane: InstalledLane, monkeypatch, capsys, *arguments: str, machine: Machine = MACHINE
) -> tuple[int, str]:
    """Run it in this process, for what is refused before a worker is started."""
    monkeypatch.setenv("VOX_HOME", str(lane.home))
    # The probe is a process of its own, and slower than all the rest of a refusal.
    monkeypatch.setattr("vox_host.cli.early_probe.begin", lambda: None)
    monkeypatch.setattr("vox_host.cli.train.probe_machine", lambda begun: machine)
    status = cli.run(["train", *arguments])
    return status, capsys.readouterr().err


def test_a_run_is_killed_loses_its_worker_is_interrupted_and_ends_in_the_same_bytes(
    lane, whole, monkeypatch, capsys
):
    run = lane.home / "stopped" / "other"
    with begun(lane, *new_run(lane, "stopped/other")) as killed:
        killed.kill()
    with begun(lane, "--resume", str(run)) as orphaned:
        worker_of(orphaned).kill()
        said = orphaned.communicate(timeout=60)[1]
    assert orphaned.returncode == 5
    assert "error[worker-died]" in said and "SIGKILL" in said
    assert re.search(r"last checkpoint  \S+/stopped/other/checkpoints/step-\d{6}\n", said)
    assert f"`vox-host train --resume {run}` goes on from step" in said
    with begun(lane, "--resume", str(run)) as interrupted:
        # It must not end meanwhile.
        interrupted.send_signal(signal.SIGSTOP)
        status, second = refused(lane, monkeypatch, capsys, "--resume", str(run))
        interrupted.send_signal(signal.SIGCONT)
        assert status == 2 and "error[run-busy]" in second and str(interrupted.pid) in second
        interrupted.send_signal(signal.SIGINT)
        out, said = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130
    assert f"`vox-host train --resume {run}` goes on" in out
    assert "Traceback" not in said
    done = train(lane, "--resume", str(run), "--micro-batch-size", "1", "--threads", "2")
    assert done.returncode == 0, done.stderr
    assert f"Next: vox-host serve --model {run}" in done.stdout
    assert results(run) == results(whole)


def test_what_was_published_is_an_adapter_that_can_be_opened(lane, whole):
    opened = open_adapter(whole)
    assert (opened.origin, opened.config.rank, opened.base_name) == ("run", 2, MODEL)
    assert {path.name for path in whole.iterdir()} >= {
        "tokenizer.json",
        "config.json",
        "run.json",
        "loss.svg",
    }
    record = json.loads((whole / "run.json").read_text())
    assert record["plugin"]["id"] == PLUGIN and len(record["plugin"]["tree_digest"]) == 64
    assert record["options"]["preset"] == "cpu"
    assert record["held_out"] == 4


def test_relative_paths_are_the_callers_and_what_was_damaged_is_put_back(lane, monkeypatch):
    monkeypatch.chdir(lane.home)
    short = ("--steps", "2", "--save-every", "1", "--batch-size", "2", "--rank", "2", "--targets", "q_proj")
    done = train(lane, "--model", MODEL, "--data", "rows.jsonl", "--out", "near/here", *short)
    assert done.returncode == 0, done.stderr
    run = lane.home / "near" / "here"
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000001", "step-000002"}
    whole = (run / "tokenizer.json").read_bytes()
    (run / "tokenizer.json").write_bytes(whole[:-1] + b" ")
    with pytest.raises(IntegrityError):
        open_adapter(run)
    (run / "config.json").unlink()
    done = train(lane, "--resume", "near/here")
    assert done.returncode == 0, done.stderr
    assert (run / "tokenizer.json").read_bytes() == whole
    assert open_adapter(run).origin == "run"


def test_what_is_gone_of_a_trained_run_is_named_and_resuming_puts_it_back(lane, monkeypatch, capsys):
    rows = lane.home / "chats.jsonl"
    turns = [
        [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n % 3}"}] for n in range(6)
    ]
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in turns))
    run = lane.home / "chats"
    short = ("--steps", "2", "--save-every", "1", "--batch-size", "2", "--rank", "2", "--targets", "q_proj")
    done = train(lane, "--model", MODEL, "--data", str(rows), "--out", str(run), *short)
    assert done.returncode == 0, done.stderr
    before = results(run)
    gone = {"adapter_manifest.json", "chat_template.jinja", "adapter_config.json"}
    for name in gone:
        content = (run / name).read_bytes()
        (run / name).unlink()
        capsys.readouterr()
        monkeypatch.setenv("VOX_HOME", str(lane.home))
        assert cli.run(["generate", "--model", str(run), "--prompt", "x"]) == 4
        said = capsys.readouterr().err
        assert f"lacks {name}" in said and f"`vox-host train --resume {run}` puts back" in said
        (run / name).write_bytes(content)
    for name in gone:
        (run / name).unlink()
    done = train(lane, "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert results(run) == before
    (run / "chat_template.jinja").write_text("{{ mine }}")
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run))
    assert status == 4 and "error[resume-template-changed]" in said and said.count("sha256:") == 2
    works = f"`rm {run / 'chat_template.jinja'}`, then `vox-host train --resume {run}` puts back"
    assert works in said
    assert cli.run(["generate", "--model", str(run), "--prompt", "x"]) == 4
    assert works in capsys.readouterr().err
    (run / "chat_template.jinja").unlink()
    done = train(lane, "--resume", str(run))
    assert done.returncode == 0, done.stderr
    assert results(run) == before
    (run / "chat_template.jinja").unlink()
    begun_as(run, template="0" * 64)
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run))
    assert status == 4 and "found     no such file" in said


def test_an_edited_run_json_changes_neither_the_run_nor_its_adapter(lane, whole, monkeypatch, capsys):
    run = lane.home / "edited"
    shutil.copytree(whole, run)
    manifest = read_verified(run)[1]
    text = (run / "run.json").read_text()
    fields = json.loads(text)
    assert manifest.run_digest == fields["record_digest"]
    fields["options"]["alpha"] *= 100
    (run / "run.json").write_text(json.dumps(fields))
    before = results(run)
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run))
    assert status == 4 and "error[run-changed]" in said and "options.alpha was changed" in said
    assert results(run) == before


def test_a_run_that_lost_its_checkpoints_keeps_metrics_and_adapter(lane, whole, monkeypatch, capsys):
    run = lane.home / "lost"
    shutil.copytree(whole, run)
    shutil.rmtree(run / "checkpoints")
    before = results(run)
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run))
    assert status == 4 and "error[checkpoints-missing]" in said
    assert results(run) == before


@pytest.fixture
def moved(lane: InstalledLane, whole: Path) -> Iterator[tuple[Path, Path]]:
    """The run, while its rows lie somewhere else and its model has another name."""
    rows, elsewhere = lane.home / "rows.jsonl", lane.home / "elsewhere.jsonl"
    model, renamed = lane.home / "models" / MODEL, lane.home / "models" / "renamed"
    run = lane.home / "moved"
    shutil.copytree(whole, run)
    rows.rename(elsewhere)
    model.rename(renamed)
    yield run, elsewhere
    elsewhere.rename(rows)
    renamed.rename(model)


def test_rows_that_were_moved_and_a_model_that_was_renamed_are_those_of_then(
    lane, moved, monkeypatch, capsys
):
    run, elsewhere = moved
    before = results(run)
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run))
    assert status == 2 and "error[data-missing]" in said
    assert f"`vox-host train --resume {run} --data FILE`" in said
    other = write_rows(lane.home / "other.jsonl", 41)
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run), "--data", str(other))
    assert status == 4 and "error[resume-data-changed]" in said and str(other) in said
    told = ("--data", str(elsewhere), "--holdout", str(elsewhere))
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run), *told)
    assert status == 2 and "holds out 4 rows of its data" in said
    assert results(run) == before
    done = train(lane, "--resume", str(run), "--data", str(elsewhere))
    assert done.returncode == 0, done.stderr
    after = results(run)
    # Where the base model is now.
    differing = {name for name in before if before[name] != after[name]}
    assert differing == {"adapter_manifest.json", "adapter_config.json"} and after.keys() == before.keys()
    manifest = read_verified(run)[1]
    assert (manifest.base_model.name, manifest.run_digest) == (
        "renamed",
        json.loads(before["run.json"])["record_digest"],
    )


def test_a_finished_run_is_told_so_before_a_worker_is_started(lane, whole, monkeypatch, capsys):
    def started(*arguments, **named):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("vox_host.cli.train.open_trainer", started)
    monkeypatch.setenv("VOX_HOME", str(lane.home))
    monkeypatch.setattr("vox_host.cli.early_probe.begin", lambda: None)
    monkeypatch.setattr("vox_host.cli.train.probe_machine", lambda begun: MACHINE)
    before = results(whole)
    assert cli.run(["train", "--resume", str(whole)]) == 0
    said = capsys.readouterr().out
    assert f"{whole} was finished before: 30 steps trained; nothing is left to do" in said
    assert f"vox-host serve --model {whole}" in said
    assert cli.run(["train", "--resume", str(whole), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ended"], facts["step"], facts["tokens_per_s"]) == ("steps", 30, None)
    assert results(whole) == before


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_a_pipe_in_a_run_s_folder_is_refused_and_not_waited_for(lane, whole, monkeypatch, capsys, name):
    run = lane.home / f"pipe-{name}"
    shutil.copytree(whole, run)
    (run / name).unlink()
    os.mkfifo(run / name)
    status, said = refused(lane, monkeypatch, capsys, "--resume", str(run))
    assert status == 2 and "error[run-special-file]" in said and name in said


@pytest.mark.parametrize("out", ["rows.jsonl/x", "rows.jsonl/x/y"])
@pytest.mark.parametrize("more", [(), ("--dry-run",), ("--preview", "1")])
def test_a_place_where_no_folder_can_be_made_is_refused_before_anything(lane, monkeypatch, capsys, out, more):
    told = ("--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--out", str(lane.home / out))
    status, said = refused(lane, monkeypatch, capsys, *told, *more)
    assert status == 2 and "out-folder" in said and "rows.jsonl is not a folder" in said


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="there is no /proc here")
def test_a_place_that_looks_writable_and_is_not_is_no_bug(lane):
    told = ("--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--out", "/proc/x/y")
    done = train(lane, *told, *OPTIONS)
    assert done.returncode == 2 and "out-folder" in done.stderr, done.stderr


def louder(run: Path, folder: Path) -> RunDirectory:
    """A copy of the run whose adapter is so much of it that greedy answers show it."""
    shutil.copytree(run, folder)
    copy = RunDirectory(folder)
    manifest = read_verified(folder)[1]
    tensors = {
        key: values * np.float32(256 if ".lora_B." in key else 1)
        for key, values in load_file(copy.adapter_model).items()
    }
    checkpoint, _ = a_checkpoint(copy.checkpoints / "louder", safetensors_bytes(tensors))
    facts = manifest.model_dump(include=set(AdapterFacts.model_fields))
    publish_adapter(copy, checkpoint, AdapterFacts(**{**facts, "adapter_digest": adapter_digest(tensors)}))
    return copy


def test_a_run_is_what_answers(lane, whole):
    """Trained and served by two commands: the run's very tensors, on its base."""
    run = louder(whole, lane.home / "louder" / "tools")
    said = {}
    for model in (MODEL, str(run.path)):
        done = lane.run(
            "generate", "--model", model, "--prompt", "what is 3?", "--temperature", "0",
            "--max-tokens", "24", "--json",
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        said[model] = json.loads(done.stdout)
    base, tuned = said.values()
    source = open_adapter(run.path)
    assert (tuned["model"], tuned["model_digest"]) == ("tools", base["model_digest"])
    assert tuned["adapter"]["digest"] == source.adapter_digest != open_adapter(whole).adapter_digest
    assert (tuned["adapter"]["base"], tuned["adapter"]["applied"]) == (MODEL, "unmerged")
    assert base["adapter"] is None
    assert tuned["token_ids"] != base["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--model", MODEL], "usage", "--data, --out missing"),
        (["--model", "gemma4", "--data", "ROWS", "--out", "NEW"], "model-not-found", "gemma3"),
        (["--model", MODEL, "--data", "NONE", "--out", "NEW"], "data-missing", "NONE"),
        (["--model", MODEL, "--data", "ROWS", "--out", "WHOLE"], "out-exists", "--resume"),
        (["--model", MODEL, "--data", "ROWS", "--out", "INSIDE"], "out-inside-run", "tools, which is a run"),
        ([*NEW, "--preset", "cpuu"], "preset-unknown", "'cpu'"),
        ([*NEW, "--steps", "1", "--epochs", "1"], "usage", "both"),
        ([*NEW, "--alpha", "nan"], "usage", "--alpha"),
        ([*NEW, "--learning-rate", "1e300"], "usage", "below 1e+30; found 1e+300"),
        ([*NEW, "--learning-rate", "1e-300"], "usage", "above 1e-30"),
        ([*NEW, "--targets", "all-linear,lm_head", "--preview", "1"], "usage", "stands alone"),
        ([*NEW, "--plugin", "a-lane:isa=reference"], "plugin-with-options", "Name the plugin alone: a-lane"),
        ([*NEW, "--holdout", "40"], "usage", "nothing to train"),
        ([*NEW, "--holdout", "0", "--patience", "1"], "usage", "held"),
        ([*NEW, "--holdout", "0", "--eval-every", "2"], "usage", "--eval-every needs held-out rows"),
        ([*NEW, "--preview", "1", "--dry-run"], "usage", "can't be given together"),
        ([*NEW, "--max-length", "9"], "data-rows-bad", "line 1 "),
        ([*NEW, "--max-length", "99999"], "context-too-long", "99999"),
        ([*NEW, "--plugin", "b-lane"], "plugin-not-found", "a-lane"),
        (["--resume", "WHOLE", "--rank", "4", "--seed", "1"], "usage", "--rank, --seed can't be given"),
        (["--resume", "NEW"], "not-a-run", "no such folder"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_before_anything_is_started(
    lane, whole, monkeypatch, capsys, arguments, code, says
):
    places = {
        "ROWS": lane.home / "rows.jsonl",
        "NEW": lane.home / "new",
        "WHOLE": whole,
        "INSIDE": whole / "checkpoints" / "step-000009",
        "NONE": lane.home / "NONE",
    }
    status, said = refused(lane, monkeypatch, capsys, *(str(places.get(word, word)) for word in arguments))
    # One that is named and not installed is 3 for every command; all else here is the user's to mend.
    assert status == (3 if code == "plugin-not-found" else 2)
    assert f"error[{code}]" in said and says in said, said
    assert not (lane.home / "new").exists()


def test_a_plugin_that_does_not_train_is_refused_with_what_it_can_do(lane, monkeypatch, capsys):
    manifest = lane.module.parent / "Plugin.toml"
    text = manifest.read_text()
    manifest.write_text(text.replace(', "train"', ""))
    lane.write_receipt()
    try:
        status, said = refused(lane, monkeypatch, capsys, *new_run(lane, "new"))
    finally:
        manifest.write_text(text)
        lane.write_receipt()
    assert status == 3
    assert 'error[no-candidate]: no installed plugin can run "train" here' in said
    assert 'has no capability "train"; it has generate, evaluate, trace' in said


@pytest.mark.parametrize("what", ["data", "model", "plugin"])
def test_a_run_whose_data_model_or_plugin_has_changed_is_refused_with_both_digests(
    lane, whole, monkeypatch, capsys, what
):
    record = json.loads((whole / "run.json").read_text())
    expected = {
        "data": record["data"]["sha256"],
        "model": record["model"]["digest"],
        "plugin": record["plugin"]["tree_digest"],
    }[what]
    run = whole
    if what == "data":
        write_rows(lane.home / "rows.jsonl", 41)
    else:
        run = lane.home / f"other-{what}"
        shutil.copytree(whole, run)
        field = {"model": "digest", "plugin": "tree_digest"}[what]
        begun_as(run, **{what: {**record[what], field: "0" * 64}})
    try:
        status, said = refused(lane, monkeypatch, capsys, "--resume", str(run))
    finally:
        write_rows(lane.home / "rows.jsonl")
    assert status == 4
    assert f"error[resume-{what}-changed]" in said
    digests = re.findall(r"(?:expected|found) +sha256:([0-9a-f]{64})", said)
    assert len(digests) == 2 and digests[0] != digests[1]
    assert expected in digests


def test_a_run_that_does_not_fit_is_refused_with_numbers_and_writes_nothing(lane, monkeypatch, capsys):
    little = MACHINE.memory.model_copy(update={"available_bytes": 2**20})
    tiny = MACHINE.model_copy(update={"memory": little})
    status, said = refused(lane, monkeypatch, capsys, *new_run(lane, "big"), machine=tiny)
    assert status == 2
    assert "error[insufficient-memory]" in said
    assert re.search(r"needed +\d+ bytes: .*weights [\d.]+ [KM]iB, ", said), said
    assert re.search(rf"there is +{2**20 - 2**20 // 10} bytes: a test", said), said
    assert not (lane.home / "big").exists()


def test_a_preview_shows_what_is_learned_and_starts_nothing(lane, monkeypatch, capsys):
    monkeypatch.setenv("VOX_HOME", str(lane.home))
    arguments = ["--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--preview", "2"]
    assert cli.run(["train", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("learned") == 2
    # Here is no colour to tell it by.
    assert len(re.findall(r"what is \d+\?>>> \d+.*<<<", shown.out)) == 2, shown.out
    assert "between >>> and <<< is learned" in shown.err and "nothing was trained" in shown.err
    assert "bold" not in shown.err
    assert "not checked, since no plugin was started: targets and memory" in shown.err


def test_answers_of_rows_without_conversations_are_warned_of(lane, monkeypatch, capsys):
    monkeypatch.setenv("VOX_HOME", str(lane.home))
    arguments = ["--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--preview", "1"]
    assert cli.run(["train", *arguments, "--answers", "last"]) == 0
    assert "--answers is not used" in capsys.readouterr().err
    assert cli.run(["train", *arguments]) == 0
    assert "--answers" not in capsys.readouterr().err


def test_a_preview_for_programs_is_one_json_document(lane, monkeypatch, capsys):
    monkeypatch.setenv("VOX_HOME", str(lane.home))
    arguments = ["--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--preview", "2", "--json"]
    assert cli.run(["train", *arguments, "--targets", "nope"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["ended"], facts["not_checked"]) == ("preview", ["targets", "memory"])
    assert len(facts["rows"]) == 2
    for row in facts["rows"]:
        read, learned = row["pieces"]
        assert (read["learned"], learned["learned"]) == (False, True)
        assert re.search(r"what is \d+\?$", read["text"]) and re.match(r" \d+", learned["text"])
        assert len(learned["token_ids"]) == row["learned"]
        assert len(read["token_ids"]) + row["learned"] == row["tokens"]


def test_a_preview_on_a_terminal_is_in_colour(lane, monkeypatch, capsys):
    monkeypatch.setenv("VOX_HOME", str(lane.home))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.delenv("NO_COLOR", raising=False)
    arguments = ["--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--preview", "1"]
    assert cli.run(["train", *arguments]) == 0
    shown = capsys.readouterr()
    assert "\x1b[1;32m" in shown.out and ">>>" not in shown.out
    assert "bold and green is learned" in shown.err


def test_a_dry_run_of_a_finished_run_says_so_and_writes_nothing(lane, whole):
    # A lock says who held it last.
    kept = [path for path in whole.rglob("*") if path.is_file() and path.name != ".lock"]
    before = {path: path.stat().st_mtime_ns for path in kept}
    done = train(lane, "--resume", str(whole), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert f"{whole} was finished before: 30 steps trained; nothing is left to do" in done.stdout
    assert done.stdout.endswith("nothing was trained or written (--dry-run)\n")
    assert {path: path.stat().st_mtime_ns for path in kept} == before


def test_a_dry_run_loads_the_model_and_writes_nothing(lane):
    done = train(lane, *new_run(lane, "dry"), "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["ended"] == "dry-run"
    assert facts["run"]["options"]["steps"] == 30
    assert sum(facts["memory"]["kinds"].values()) == facts["memory"]["total"] > 0
    assert not (lane.home / "dry").exists()
