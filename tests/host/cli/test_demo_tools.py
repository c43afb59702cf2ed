"""The demo's second act: what it shows, and what it does when its time is up."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import typer

from vox_host.cli import demo_tools
from vox_host.errors import VoxError
from vox_host.training.data import read_rows, shipped_data
from vox_host.training.tool_calls import questions

ASKED = questions(read_rows(shipped_data("tool-calls", "heldout")))[: demo_tools.QUESTIONS]
CALLS = [
    f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': call.arguments})}\n</tool_call>"
    for call in (question.expected[0] for question in ASKED)
]


def act(monkeypatch, tmp_path, adapter: list[str]) -> Path:
    """Play the act with these answers; the base answers everything with a sentence."""
    said = {1: ["I can do that."] * len(ASKED), 2: adapter}
    ports = iter((1, 2))
    monkeypatch.setattr(demo_tools, "_train", lambda model, runs: runs / "a-run")
    monkeypatch.setattr(demo_tools, "_prompts", lambda model, asked: [[n] for n in range(len(asked))])
    monkeypatch.setattr(demo_tools, "serving", lambda model: contextlib.nullcontext(next(ports)))
    monkeypatch.setattr(demo_tools, "get", lambda port, path: {"data": [{"id": f"model-{port}"}]})

    def post(port, path, body):
        assert (body["model"], body["temperature"]) == (f"model-{port}", 0)
        chosen = [{"index": place, "text": said[port][ids[0]]} for place, ids in enumerate(body["prompt"])]
        return {"choices": chosen[::-1]}, 0.1

    monkeypatch.setattr(demo_tools, "post", post)
    return demo_tools.second_act("a-model", tmp_path)


def test_base_and_adapter_are_shown_side_by_side_with_an_interval(monkeypatch, tmp_path, capsys):
    half = [call if number % 2 else "no" for number, call in enumerate(CALLS)]
    assert act(monkeypatch, tmp_path, half) == tmp_path / "a-run"
    shown = capsys.readouterr().out
    assert "base      0 of 60 (0.0%" in shown
    assert "adapter   30 of 60 (50.0%; 95% interval 37.7% to 62.3%)" in shown
    assert "gain      +50.0% (95% interval +" in shown
    assert "expected: base 0 of 60 (0.0%" in shown and "adapter 30 of 60" in shown.splitlines()[-1]
    assert shown.count("asked     ") == demo_tools.SHOWN


def test_an_adapter_that_is_no_better_is_an_error_with_the_numbers(monkeypatch, tmp_path):
    with pytest.raises(VoxError) as caught:
        act(monkeypatch, tmp_path, ["no"] * len(ASKED))
    assert caught.value.code == "demo-no-gain"
    assert "before 0 of 60" in dict(caught.value.facts)["found"]
    assert str(tmp_path / "a-run") in caught.value.remedy


def command(tmp_path: Path, lines: str) -> str:
    """A stand-in for the interpreter that would run `vox-host train`."""
    path = tmp_path / "command"
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o755)
    return str(path)


def test_a_training_whose_time_is_up_is_stopped_as_ctrl_c_would_and_used(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(demo_tools, "TRAIN_LIMIT_S", 0.5)
    waits = "trap 'exit 130' INT\nwhile :; do sleep 0.05; done"
    monkeypatch.setattr("sys.executable", command(tmp_path, waits))
    (tmp_path / "tool-calls-1").mkdir()
    assert demo_tools._train("a-model", tmp_path) == tmp_path / "tool-calls-2"
    assert "time is up" in capsys.readouterr().out


def test_a_training_that_fails_ends_the_demo_with_its_status(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.executable", command(tmp_path, "exit 5"))
    with pytest.raises(typer.Exit) as caught:
        demo_tools._train("a-model", tmp_path)
    assert caught.value.exit_code == 5
