"""The order of `vox-host demo`; the steps themselves are tested where they live."""

from __future__ import annotations

import contextlib
import re
import time

from vox_host.cli import demo


def test_the_doctor_is_asked_once_there_is_a_plugin_to_choose(tmp_path, monkeypatch, capsys):
    (tmp_path / "mens-cpu-ref").mkdir()
    steps: list[str] = []
    monkeypatch.setattr(demo, "_step", lambda title, *words, **_: steps.append(" ".join(words[:2])))
    monkeypatch.setattr(demo, "serving", lambda model: contextlib.nullcontext(1))
    monkeypatch.setattr(demo, "_ask", lambda port: steps.append("ask"))
    monkeypatch.setattr(demo, "second_act", lambda model, runs: steps.append("train") or runs / "a-run")
    demo.demo(wheels=tmp_path, started=time.time() - 327)
    assert steps == ["plugin install", "doctor", "model import", "ask", "train"]
    demo.demo(wheels=tmp_path, no_training=True)
    assert steps[5:] == ["plugin install", "doctor", "model import", "ask"]
    # The Makefile hands over when it began: its own steps take longer than these.
    assert re.search(r"the whole demo took 32[78] s, set-up and wheels included", capsys.readouterr().out)
