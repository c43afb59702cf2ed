"""`plugin check --numerics fast` of a plugin that has both kinds: a CPU computes its bfloat16."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import mens_torch_cuda
from fixtures.installed_lane import InstalledLane, install_lane
from lanes.every_lane import make_lane

CODE = """
import sys

sys.path.append({source!r})
import torch
from mens_core.backend import MensBackend
from mens_core.conformance.quick import self_test
from mens_core.ops import Ops
from mens_cpu_ref.library import load_library
from mens_cpu_ref.training_lane import CpuTrainingOps
from mens_torch_cuda.fast.mode import fast_mode
from mens_torch_cuda.fast.ops import FastOps
from vox_plugin_api.backend import BackendInfo

torch.set_num_threads(1)
{bug}


def backend():
    library = load_library()
    library.set_threads(1)

    def make_lane(params=None):
        return CpuTrainingOps(library)

    info = BackendInfo(
        "vox-lane", "1.0.0", "cpu", ("canonical", "fast"), ("generate", "evaluate", "trace", "adapters")
    )
    fast = fast_mode(torch.device("cpu"), facts={{}})
    return MensBackend(info, make_lane, lambda: self_test(make_lane), fast=fast)
"""


@pytest.fixture(autouse=True, scope="module")
def _native(request):
    make_lane("mens-cpu-ref", request.config)


def a_lane(home: Path, bug: str = "") -> InstalledLane:
    code = CODE.format(source=str(Path(mens_torch_cuda.__file__).parents[1]), bug=bug)
    capabilities = '"generate", "evaluate", "trace", "adapters"'
    return install_lane(home, "vox-lane", code, numerics='"canonical", "fast"', capabilities=capabilities)


def check(lane: InstalledLane, *arguments: str, status: int) -> dict:
    done = lane.run("plugin", "check", lane.plugin_id, "--json", *arguments)
    assert done.returncode == status, f"{done.stderr}\n{done.stdout}"
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def lane(tmp_path_factory):
    return a_lane(tmp_path_factory.mktemp("fast") / "home")


long = pytest.mark.skipif(
    "VOX_LONG_CHECKS" not in os.environ,
    reason="a minute of workers that import torch: VOX_LONG_CHECKS=1; test_fast_grades.py grades in process",
)


@long
def test_fast_numerics_are_within_the_tolerance_and_never_bitwise(lane):
    groups = ("evaluate", "adapters", "generation")
    only = [word for group in groups for word in ("--only", group)]
    facts = check(lane, "--numerics", "fast", *only, status=0)
    assert facts["verdict"] in ("same tokens", "within tolerance")
    assert (facts["numerics"], facts["failed"]) == (["fast"], 0)
    assert "bfloat16" in facts["tolerance"] and not facts["is_complete"]
    assert not (lane.home / "plugins/.verdicts").exists(), "a verdict of fast numerics is not the plugin's"


@long
def test_a_wrong_fast_mode_fails(tmp_path):
    bug = "FastOps.head_norm = lambda self, x, weight, heads, eps, *, name: Normed(x, weight * 0 + 1, eps)"
    lane = a_lane(tmp_path / "home", f"from mens_torch_cuda.fast.ops import Normed\n{bug}")
    assert check(lane, "--numerics", "fast", "--only", "evaluate", status=6)["verdict"] == "failed"
    # The canonical kind of the same plugin is what it was.
    assert check(lane, "--only", "evaluate", status=0)["verdict"] == "bitwise"


def test_numerics_that_a_plugin_lacks_are_refused_before_a_start(lane, tmp_path):
    done = lane.run("plugin", "check", "vox-lane", "--numerics", "exact", "--json")
    assert done.returncode == 2 and "canonical, fast" in done.stdout + done.stderr
    only = install_lane(tmp_path / "home", "vox-lane", "raise SystemExit", numerics='"canonical"')
    done = only.run("plugin", "check", "vox-lane", "--numerics", "fast", "--json")
    assert done.returncode == 2 and "has no fast numerics" in done.stdout + done.stderr
