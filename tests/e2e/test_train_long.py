"""A run on the demo model, killed twenty times: the long form of tests/host/training/test_drive.py."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess

import pytest

from e2e.conftest import MODEL, Cli
from fixtures.training_runs import results
from vox_host.training.data import shipped_data

KILLS = 20
OPTIONS = ("--steps", "24", "--save-every", "1", "--eval-every", "6", "--batch-size", "2", "--dropout", "0.1")
OPTIONS = (*OPTIONS, "--holdout", "4", "--keep-last", "2")


@pytest.mark.real_model
@pytest.mark.timeout(7200)
@pytest.mark.skipif(not os.environ.get("VOX_TEST_LONG"), reason="takes minutes; VOX_TEST_LONG=1 runs it")
def test_the_demo_models_run_is_killed_twenty_times_and_ends_in_the_same_bytes(cli: Cli, tmp_path) -> None:
    begin = ("train", "--model", MODEL, "--data", str(shipped_data("tool-calls")), *OPTIONS)
    whole, killed = tmp_path / "whole" / "run", tmp_path / "killed" / "run"
    done = cli.run(*begin, "--out", str(whole), timeout=3600)
    assert done.returncode == 0, done.stderr
    chance = random.Random(20)
    deaths = 0
    while deaths < KILLS:
        goes_on = (killed / "run.json").is_file()
        arguments = ("train", "--resume", str(killed)) if goes_on else (*begin, "--out", str(killed))
        with cli.start(*arguments) as life:
            with contextlib.suppress(subprocess.TimeoutExpired):
                life.wait(chance.uniform(0, 15))
            assert life.returncode is None, f"the run ended after {deaths} deaths of {KILLS}"
            life.kill()
            deaths += 1
    done = cli.run("train", "--resume", str(killed), timeout=3600)
    assert done.returncode == 0, done.stderr
    assert results(killed) == results(whole)
