"""Ctrl-C and SIGTERM where no step is waited for: a word, the next command, and the signal's own status."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import typer

from fixtures.installed_lane import install_lane, lane_manifest
from fixtures.tiny_home import add_tiny_model
from fixtures.training_home import write_rows
from fixtures.training_runs import a_job, a_model, run_to_end
from vox_host import cli
from vox_host.cli import train as command
from vox_host.cli.train_report import LineReport
from vox_host.cli.train_stop import Stop, stop_on_signal
from vox_host.training.pace import Pace

SLOW = "import time\n\n\ndef backend():\n    time.sleep(60)\n"


async def stopped_twice(stop, first, second):
    pace = Pace(steps=1, eval_every=1, save_every=1, keep_last=1, patience=None)
    with stop_on_signal(LineReport(pace).say, stop):
        for number in (first, second):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.05)
        await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("first", "second", "status"),
    [
        (signal.SIGTERM, signal.SIGTERM, 143),
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGINT, signal.SIGTERM, 143),
    ],
)
def test_a_second_signal_stops_at_once_with_its_own_status(tmp_path, capsys, first, second, status):
    stop = Stop()
    with pytest.raises(typer.Exit) as ended:
        command._run(stopped_twice(stop, first, second), stop, tmp_path / "run")
    assert ended.value.exit_code == status
    said = capsys.readouterr().err
    again = f"`vox-host train --resume {tmp_path / 'run'}` begins again from step 1"
    assert f"the step was not finished; there is no checkpoint yet: {again}" in said
    assert "last checkpoint" not in said


def test_a_second_signal_names_the_checkpoint_that_stands(tmp_path, capsys):
    model = a_model(tmp_path / "model")
    run_to_end(a_job(tmp_path / "run", model), model)
    stop = Stop()
    with pytest.raises(typer.Exit):
        command._run(stopped_twice(stop, signal.SIGTERM, signal.SIGTERM), stop, tmp_path / "run")
    goes_on = f"`vox-host train --resume {tmp_path / 'run'}` goes on from the last checkpoint, step 12"
    assert goes_on in capsys.readouterr().err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stop_while_the_plugin_starts_is_told_with_what_is_next(tmp_path, number, status):
    home = tmp_path / "home"
    add_tiny_model(home, "gemma3", name="gemma3")
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    capabilities = '"generate", "evaluate", "trace", "train", "adapters"'
    install_lane(home, "slow-lane", SLOW, lane_manifest("slow-lane", capabilities=capabilities))
    arguments = ("--model", "gemma3", "--data", str(rows), "--out", str(tmp_path / "run"))
    process = subprocess.Popen(
        [sys.executable, "-m", "vox_host", "train", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "VOX_HOME": str(home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while not any("vox_plugin_api.child" in words for words in children_of(process)):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        os.killpg(process.pid, number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, said
    assert "stopped; nothing was trained or written, and the same command begins again" in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()


def children_of(process: subprocess.Popen[str]) -> list[list[str]]:
    found = []
    for child in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.Error):
            found.append(child.cmdline())
    return found


@pytest.fixture
def interrupted(monkeypatch):
    def press(*arguments, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr("vox_host.cli.early_probe.begin", lambda: None)
    for place in ("train._resume", "merge._write", "export._write"):
        monkeypatch.setattr(f"vox_host.cli.{place}", press)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train", "--resume", "RUN"], "goes on from the last checkpoint, step 12"),
        (["train", "--resume", "RUN", "--dry-run"], "nothing was trained or written"),
        (["merge", "RUN", "--out", "NEW"], "nothing was written, and the same command begins again"),
        (["merge", "RUN", "--name", "new"], "nothing was written, and the same command begins again"),
        (["export", "RUN", "--to", "hf", "--out", "NEW"], "nothing was written, and the same command"),
    ],
)
def test_ctrl_c_is_told_by_resume_merge_and_export(
    tmp_path, interrupted, monkeypatch, capsys, arguments, says
):
    model = a_model(tmp_path / "model")
    run_to_end(a_job(tmp_path / "run", model), model)
    monkeypatch.setenv("VOX_HOME", str(tmp_path / "home"))
    opened = type("Opened", (), {"catalogue": type("C", (), {"models_dir": tmp_path / "store"})})
    monkeypatch.setattr(
        "vox_host.cli.adapter_options.AdapterOptions.open", lambda *_: contextlib.nullcontext(opened)
    )
    places = {"RUN": str(tmp_path / "run"), "NEW": str(tmp_path / "new")}
    assert cli.run([places.get(word, word) for word in arguments]) == 130
    said = capsys.readouterr().err
    assert said.startswith("stopped; ") and says in said
    assert not (tmp_path / "new").exists()
