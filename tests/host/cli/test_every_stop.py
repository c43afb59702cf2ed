"""Ctrl-C and SIGTERM in each command: one line that is true, the signal's status, nothing half-written."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
import typer

from fixtures.tiny_home import add_tiny_model
from vox_host import cli
from vox_host.cli import demo_tools
from vox_host.models import importing
from vox_host.models.catalogue import Catalogue

SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143)]

COMMANDS: dict[str, tuple[list[str], str, str]] = {
    "doctor": ([], "cli.doctor.probe_machine", "not all was shown"),
    "plugin list": ([], "cli.plugin.discover", "not all was shown"),
    "plugin show": (["x"], "cli.plugin_named.discover", "not all was shown"),
    "plugin explain": ([], "cli.plugin.discover", "not all was shown"),
    "plugin verify": ([], "cli.plugin.discover", "not every byte was compared"),
    "plugin install": (["--path", "HERE"], "installation.install", "nothing was installed"),
    "plugin pack": (["--path", "HERE", "--out", "OUT"], "packing.pack_plugin", "nothing was written"),
    "plugin check": (
        ["x"],
        "cli.plugin_check.find_plugin",
        "the plugin was not judged: no verdict",
    ),
    "plugin remove": (["x"], "installation.remove", "x is not installed any more"),
    "model import": (["HERE"], "models.importing.open_source", "nothing was imported"),
    "model list": ([], "models.catalogue.Catalogue.list", "not all was shown"),
    "model show": (["x"], "models.catalogue.Catalogue.find", "not all was shown"),
    "model verify": ([], "models.catalogue.Catalogue.list", "not every byte was compared"),
    "model remove": (["tiny"], "models.catalogue.check_name", "tiny is still in the store"),
    "generate": (
        ["--model", "x", "--prompt", "x"],
        "cli.generate.with_model",
        "the answer is not whole",
    ),
    "chat": (["--model", "x"], "cli.generate.with_model", "the conversation is over"),
    "serve": (["--model", "x", "--port", "0"], "cli.serve.with_model", "the server was not started"),
    "train": (
        ["--model", "x", "--data", "x", "--out", "OUT"],
        "cli.train.prepare",
        "nothing was trained or written",
    ),
    "merge": (
        ["HERE", "--out", "OUT"],
        "cli.adapter_options.AdapterOptions.open",
        "nothing was written",
    ),
    "export": (
        ["HERE", "--to", "peft"],
        "cli.adapter_options.AdapterOptions.open",
        "nothing was written",
    ),
    "parity": (
        ["--model", "x", "--plugin", "x"],
        "cli.parity.find_stored_model",
        "the comparison did not come to its end",
    ),
    "demo": (["--wheels", "WHEELS"], "cli.demo.own_command", "the demo ends here"),
}
"""Command to its arguments, the step in which it is stopped, and what it then says."""


@pytest.fixture(autouse=True)
def as_a_program(monkeypatch, tmp_path):
    """Hear signals as `main` does, in a home with one model, broken."""
    monkeypatch.setenv("VOX_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("vox_host.cli.early_probe.begin", lambda: None)
    (tmp_path / "home" / "models" / "tiny").mkdir(parents=True)
    was = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.SIGTERM: signal.signal(signal.SIGTERM, cli._terminate),
    }
    yield
    for number, handler in was.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return add_tiny_model(tmp_path_factory.mktemp("elsewhere"), "qwen3", name="source")


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(5)
    raise AssertionError("the signal was not heard")


def stopping(number: int):
    return lambda *_, **__: send(number)


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> list[str]:
    inner = getattr(command, "commands", None)
    if inner is None:
        return [" ".join(path)]
    return [leaf for name in inner for leaf in leaves(inner[name], (*path, name))]


def test_every_command_is_in_the_table():
    found: set[str] = set()
    for name in cli.COMMANDS:
        # A root with one command is that command, and has no name.
        found |= {leaf or name for leaf in leaves(typer.main.get_command(cli._build([name])))}
    assert found == set(COMMANDS)


@pytest.mark.parametrize(("number", "status"), SIGNALS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_is_stopped_says_what_was_not_done(
    monkeypatch, tmp_path, capsys, command, number, status
):
    arguments, step, says = COMMANDS[command]
    places = {"HERE": tmp_path, "OUT": tmp_path / "out", "WHEELS": tmp_path / "wheels"}
    (tmp_path / "wheels" / "mens-cpu-ref").mkdir(parents=True)
    monkeypatch.setattr(f"vox_host.{step}", stopping(number))
    words = [str(places.get(word, word)) for word in arguments]
    assert cli.run([*command.split(), *words]) == status
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith(f"stopped; {says}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_an_import_that_is_stopped_leaves_nothing_and_can_be_repeated(
    monkeypatch, tmp_path, capsys, source, number, status
):
    command = ["model", "import", str(source), "--name", "new", "--accept-license"]
    write = importing._write_manifest
    monkeypatch.setattr(importing, "_write_manifest", stopping(number))
    assert cli.run(command) == status
    assert "stopped; nothing was imported, and the same command begins again" in capsys.readouterr().err
    store = tmp_path / "home" / "models"
    assert sorted(path.name for path in store.iterdir()) == [".lock", "tiny"]
    monkeypatch.setattr(importing, "_write_manifest", write)
    assert cli.run(command) == 0


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_an_import_that_was_finished_when_it_was_stopped_says_so(monkeypatch, capsys, source, number, status):
    monkeypatch.setattr(importing, "note_as_verified", stopping(number))
    assert cli.run(["model", "import", str(source), "--name", "new", "--accept-license"]) == status
    assert "stopped; new is imported, and only the rest was not shown" in capsys.readouterr().err


def test_what_a_stopped_removal_leaves_is_swept_by_the_next_one(monkeypatch, tmp_path, capsys):
    store = tmp_path / "home" / "models"
    (store / "other").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", stopping(signal.SIGINT))
        assert cli.run(["model", "remove", "tiny"]) == 130
    assert "stopped; tiny is not in the store any more; the next import" in capsys.readouterr().err
    assert len(list(store.glob(".removed-*"))) == 1
    Catalogue(store).remove("other")
    assert not list(store.glob(".removed-*"))


def test_what_was_not_heard_by_a_command_is_told_at_the_root(monkeypatch, capsys):
    monkeypatch.setattr(cli, "_build", stopping(signal.SIGTERM))
    assert cli.run(["doctor"]) == 143
    assert capsys.readouterr().err == "stopped; nothing was done, and the same command begins again\n"


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_a_stop_while_the_command_line_is_imported_is_told_without_a_traceback(number, status):
    lines = (
        "import os, sys, time, types",
        "import vox_host, vox_host.entry",
        "vox_host.cli = sys.modules['vox_host.cli'] = types.ModuleType('vox_host.cli')",
        f"vox_host.cli.main = lambda: (os.kill(os.getpid(), {int(number)}), time.sleep(5))",
        "vox_host.entry.main()",
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == status
    assert done.stderr == "stopped; nothing was done, and the same command begins again\n"


def a_command(tmp_path: Path, lines: str) -> str:
    path = tmp_path / "command"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("number", "status"), SIGNALS)
def test_the_demo_lets_a_training_save_before_it_ends(monkeypatch, tmp_path, number, status):
    saves = f"trap 'sleep 0.2; touch {tmp_path}/saved; exit {status}' INT TERM"
    lines = f"{saves}\ntouch {tmp_path}/began\nwhile :; do sleep 0.05; done"
    monkeypatch.setattr("sys.executable", a_command(tmp_path, lines))
    wait = subprocess.Popen.wait
    waits: list[float | None] = []

    def told_meanwhile(process, timeout=None):
        waits.append(timeout)
        if len(waits) > 1:
            return wait(process, timeout)
        while not (tmp_path / "began").exists():
            time.sleep(0.02)
        if number == signal.SIGINT:
            # A terminal tells both.
            process.send_signal(number)
        return send(number)

    monkeypatch.setattr(subprocess.Popen, "wait", told_meanwhile)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        demo_tools._train("a-model", tmp_path)
    assert (tmp_path / "saved").exists()
