"""`vox-host train --devices`: a verified plugin that trains in several processes, CPUs in place of GPUs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import psutil
import pytest

from fixtures.fast_folder import fast_folder
from fixtures.installed_lane import InstalledLane, install_lane, lane_manifest
from fixtures.processes import still_alive
from fixtures.tiny_home import add_tiny_model
from fixtures.training_home import LANE, MODEL, PLUGIN, begun, write_rows
from fixtures.training_runs import results

pytest.importorskip("torch.distributed")
CUDA_SOURCES = Path(__file__).parents[2] / "plugins/mens-torch-cuda/src"
RANKS = f"""
import sys

sys.path.append({str(CUDA_SOURCES)!r})
print("noise of an import")

from mens_core.peers.wire import PeerSetup
{LANE}

plain = backend


def open_wire(place, ops, look):
    from mens_torch_cuda.wire import TorchWire

    print("noise on standard output", flush=True)
    return TorchWire(place, ops, look, kind="gloo")


def backend():
    made = plain()
    made.peers = PeerSetup(
        entry=f"{{__name__}}:backend",
        devices=lambda: 3,
        environment=lambda rank: {{"OMP_NUM_THREADS": "1"}},
        open_wire=open_wire,
    )
    return made
"""
OPTIONS = ("--steps", "5", "--save-every", "1", "--eval-every", "3", "--batch-size", "3", "--rank", "2")
OPTIONS = (*OPTIONS, "--targets", "q_proj,down_proj", "--dropout", "0.1", "--seed", "3")


@pytest.fixture(scope="module")
def lane(tmp_path_factory):
    with fast_folder(tmp_path_factory.mktemp("ranks")) as folder:
        home = folder / "home"
        add_tiny_model(home, MODEL)
        write_rows(home / "rows.jsonl")
        manifest = lane_manifest(PLUGIN, capabilities='"generate", "evaluate", "trace", "train", "adapters"')
        yield install_lane(home, PLUGIN, RANKS, manifest)


def new_run(lane: InstalledLane, name: str, devices: int) -> list[str]:
    return [
        *("--model", MODEL, "--data", str(lane.home / "rows.jsonl"), "--out", str(lane.home / name)),
        *("--devices", str(devices), *OPTIONS),
    ]


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    children = psutil.Process(process.pid).children(recursive=True)
    return [child for child in children if "mens_core.peers.child" in child.cmdline()]


def test_a_run_loses_a_rank_and_its_host_and_ends_in_the_bytes_of_one_device(lane):
    whole, run = lane.home / "whole" / "run", lane.home / "ranks" / "run"
    done = lane.run("train", *new_run(lane, "whole/run", 1), "--json")
    assert done.returncode == 0, done.stderr
    with begun(lane, *new_run(lane, "ranks/run", 2)) as process:
        ranks = ranks_of(process)
        assert len(ranks) == 1
        # Verified bytes run there too: the same interpreter and flags as the worker's.
        assert all(rank.cmdline()[1:3] == ["-I", "-B"] for rank in ranks)
        ranks[0].kill()
        said = process.communicate(timeout=60)[1]
    assert process.returncode == 5
    assert "error[peer-lost]" in said and "rank 1 of the training" in said and "ended with signal 9" in said
    assert f"`vox-host train --resume {run}` goes on from step" in said
    assert "Traceback" not in said
    assert still_alive(ranks, 5) == []
    with begun(lane, "--resume", str(run), "--devices", "2") as process:
        ranks = ranks_of(process)
        assert len(ranks) == 1
        process.kill()
    assert still_alive(ranks, 5) == []
    done = lane.run("train", "--resume", str(run), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 5
    assert results(run) == results(whole)


def test_devices_that_are_not_there_are_told_before_anything_is_written(lane):
    done = lane.run("train", *new_run(lane, "none", 4))
    assert done.returncode == 5
    assert "error[devices-missing]" in done.stderr
    assert "4 devices were asked for and this worker can use 3" in done.stderr
    assert not (lane.home / "none").exists()
