"""Fast mode through the command line, a CPU computing its bfloat16: named in all that is said and written.

Workers that import torch: a minute. VOX_LONG_CHECKS=1 runs it; what it is made of is tested in process by
tests/torch_cuda/test_fast_backend.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import mens_torch_cuda
from fixtures import training_home
from fixtures.installed_lane import InstalledLane, install_lane, lane_manifest
from fixtures.tiny_home import add_tiny_model
from lanes.every_lane import make_lane

pytestmark = pytest.mark.skipif(
    "VOX_LONG_CHECKS" not in os.environ, reason="a minute of workers that import torch: VOX_LONG_CHECKS=1"
)

HEAD = f"""
import sys

sys.path.append({str(Path(mens_torch_cuda.__file__).parents[1])!r})
import torch
from mens_torch_cuda.fast.mode import fast_mode

torch.set_num_threads(1)
"""
CAPABILITIES = '"generate", "evaluate", "trace", "train", "adapters"'
STEPS = (
    "--steps",
    "3",
    "--batch-size",
    "2",
    "--rank",
    "2",
    "--targets",
    "q_proj,down_proj",
    "--save-every",
    "2",
)


@pytest.fixture(scope="module")
def lane(tmp_path_factory, request) -> InstalledLane:
    make_lane("mens-cpu-ref", request.config)
    home = tmp_path_factory.mktemp("fast") / "home"
    add_tiny_model(home, training_home.MODEL)
    training_home.write_rows(home / "rows.jsonl")
    code = HEAD + training_home.LANE.replace('("canonical",)', '("canonical", "fast")').replace(
        "make_training_lane=", 'fast=fast_mode(torch.device("cpu"), facts={}), make_training_lane='
    )
    plugin = training_home.PLUGIN
    manifest = lane_manifest(plugin, numerics='"canonical", "fast"', capabilities=CAPABILITIES)
    return install_lane(home, plugin, code, manifest)


@pytest.fixture(scope="module")
def trained(lane) -> Path:
    out = lane.home / "runs/fast"
    done = lane.run("train", "--model", training_home.MODEL, "--data", lane.home / "rows.jsonl", "--out", out,
                    "--numerics", "fast", *STEPS)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "fast numerics (beside canonical, on 96 positions" in done.stderr
    return out


def test_a_run_says_what_it_was_computed_in(trained):
    recorded = json.loads((trained / "run.json").read_text())["numerics"]
    assert recorded["mode"] == "fast" and 0 < recorded["error"]["mean_kl"] < 1
    manifest = json.loads((trained / "adapter_manifest.json").read_text())
    assert manifest["numerics"] == recorded
    states = [json.loads(path.read_text()) for path in trained.glob("checkpoints/*/state.json")]
    assert states and all(state["numerics"] == "fast" for state in states)


def test_a_run_goes_on_in_fast_numerics_unasked(lane, trained):
    done = lane.run("train", "--resume", trained, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 3


@pytest.mark.parametrize("asked", ["fast", "any"])
def test_answers_name_the_numerics_that_were_asked_for(asked, lane, trained):
    done = lane.run("generate", "--model", trained, "--prompt", "what is 3?", "--max-tokens", "4",
                    "--numerics", asked, "--json")  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["numerics"] == ("fast" if asked == "fast" else "canonical")
    assert (answer["numerics_error"] is None) == (asked == "any")
