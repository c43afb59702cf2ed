"""The CUDA plugin as the host sees it on a machine without an NVIDIA GPU; and its scripts there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.stated_backend import assert_manifest_is_what_is_stated
from vox_host.hardware.record import Cpu, Device, Machine, Memory
from vox_host.manifest import load_manifest
from vox_host.resolution import Candidate, Request, explain

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins/mens-torch-cuda/src/mens_torch_cuda"
HAS_NVIDIA = shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def a_machine(*devices: Device) -> Machine:
    return Machine(
        os="linux",
        os_version="6.1",
        arch="x86_64",
        python="3.11.7",
        cpu=Cpu(name="a CPU", isa=("x86-64-v3",), usable_threads=2),
        memory=Memory(total_bytes=1 << 34, available_bytes=1 << 33, source="test"),
        devices=devices,
    )


def an_nvidia(capability: str) -> Device:
    return Device(
        kind="nvidia", index=0, name="a GPU", total_bytes=1 << 34, free_bytes=1 << 33,
        compute_capability=capability, driver="580.159.04",
    )  # fmt: skip


def hardware_stage(machine: Machine):
    candidate = Candidate(
        plugin_id="mens-torch-cuda",
        version="0.1.0",
        origin="environment",
        location=str(PACKAGE / "Plugin.toml"),
        manifest=load_manifest(PACKAGE / "Plugin.toml")[0],
        python=Path(sys.executable),
    )
    (record,) = (r for r in explain(Request(), machine, [candidate]) if r.stage == "hardware")
    return record


def test_the_manifest_asks_for_a_gpu_that_the_lane_will_take():
    assert hardware_stage(a_machine(an_nvidia("8.0"))).status == "passed"
    assert hardware_stage(a_machine(an_nvidia("9.0"))).status == "passed"
    old = hardware_stage(a_machine(an_nvidia("7.5")))
    assert (old.status, "7.5" in old.detail) == ("failed", True)
    none = hardware_stage(a_machine())
    assert (none.status, none.code) == ("failed", "device-missing")


def test_the_manifest_is_what_the_backend_states():
    """The handshake compares them; this reads the entry point's constants without a GPU."""
    assert_manifest_is_what_is_stated(PACKAGE, "cuda")


def test_importing_the_entry_point_imports_neither_torch_nor_cuda():
    code = "import sys, mens_torch_cuda.plugin; print(sorted({'torch', 'cuda'} & sys.modules.keys()))"
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.skipif(HAS_NVIDIA, reason="this machine has an NVIDIA driver: make test-cuda is for it")
def test_explain_says_why_not_without_a_gpu(tmp_path: Path):
    shutil.copytree(PACKAGE, tmp_path / "mens_torch_cuda", ignore=shutil.ignore_patterns("__pycache__"))
    info = tmp_path / "mens_torch_cuda-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mens-torch-cuda\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text(
        "[vox_host.backends]\nmens-torch-cuda = mens_torch_cuda.plugin:backend\n"
    )
    (info / "RECORD").write_text("mens_torch_cuda/Plugin.toml,,\n")
    path = os.pathsep.join([str(tmp_path), *(entry for entry in sys.path if entry)])
    done = subprocess.run(
        [sys.executable, "-m", "vox_host", "plugin", "explain", "mens-torch-cuda"],
        env={**os.environ, "PYTHONPATH": path, "VOX_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "needs an NVIDIA device; this machine has none" in done.stdout
    assert "Would run: mens-torch-cuda" not in done.stdout


@pytest.mark.skipif(HAS_NVIDIA, reason="this machine has an NVIDIA driver: make test-cuda is for it")
@pytest.mark.parametrize(
    "script",
    [
        "tests/gpu/check_lane.py",
        "tests/gpu/check_ranks.py",
        "tests/gpu/check_fast.py",
        "bench/inference_gpu.py",
        "bench/fast.py",
    ],
)
def test_the_gpu_s_scripts_say_that_they_ran_nothing(script: str, tmp_path: Path):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, ROOT / script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SKIPPED: ")
    assert "no check of the CUDA lane was run" in done.stdout or "nothing was measured" in done.stdout
    assert not list(tmp_path.iterdir())
