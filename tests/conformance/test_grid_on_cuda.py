"""The script that runs the grid kernels on a GPU, tried on the CPU in a GPU's place."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpu.record_grid import Recorder, record, write
from grid_shim import build as shim
from grid_shim.check import SERVING
from mens_core.kernel_source import grid_source

SCRIPT = Path(__file__).parents[1] / "gpu/run_grid.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if shim.compiler() is None:
        pytest.skip("needs a C++ compiler or the ziglang wheel")
    return tmp_path_factory.mktemp("grid_on_cuda")


@pytest.fixture(scope="module")
def recorded(library, folder) -> Recorder:
    # Those that serve: the script knows no difference, and all of them take twice as long.
    return record(library, folder, SERVING)


@pytest.fixture(scope="module")
def run(folder):
    """Runs the script with a driver that is the CPU, and a compiler that compiles nothing."""
    driver = shim.build(
        folder, grid_source("cuda"), "cuda", units=(shim.RUNNER, shim.HERE / "cuda_driver.cpp")
    )
    nvcc = folder / "nvcc"
    nvcc.write_text(
        '#!/bin/sh\necho "the CPU, version 1"\n'
        '[ "$1" = --version ] && exit\nfor last; do :; done\n: > "$last"\n'
    )
    nvcc.chmod(0o755)

    def call(vectors, *arguments, **environment):
        path = os.pathsep.join([str(folder), os.environ["PATH"]])
        return subprocess.run(
            [sys.executable, "-I", SCRIPT, vectors, "--compiler", "nvcc", *arguments],
            capture_output=True,
            text=True,
            env={**os.environ, "PATH": path, "VOX_LIBCUDA": str(driver), **environment},
        )

    return call


def test_every_recorded_launch_is_repeated(recorded, run, folder):
    write(recorded, folder / "good.npz")
    done = run(folder / "good.npz")
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(recorded.launches)
    kernels = {launch["kernel"] for launch in recorded.launches}
    assert count > 400
    assert f"BITWISE: numerics 1, {count} launches of {len(kernels)} kernels, 0 differ" in done.stdout


def test_all_that_differs_is_named(recorded, run, folder):
    """Two launches expect something else: both are printed, and the verdict is that of a failure."""
    changed = Recorder()
    changed.buffers = dict(recorded.buffers)
    changed.launches = json.loads(json.dumps(recorded.launches))
    for kernel, number in (("vox_add", 2), ("vox_norm", 2)):
        launch = next(item for item in changed.launches if item["kernel"] == kernel)
        values = changed.buffers[launch["after"][number]].copy()
        values[4] ^= 1
        launch["after"][number] = f"changed_{kernel}"
        changed.buffers[f"changed_{kernel}"] = values
    write(changed, folder / "bad.npz")
    done = run(folder / "bad.npz")
    assert done.returncode == 1
    assert "vox_add: buffer 2, element 1: " in done.stdout
    assert "vox_norm: buffer 2, element 1: " in done.stdout
    assert "FAILED" in done.stdout.splitlines()[-1] and ", 2 differ" in done.stdout.splitlines()[-1]


def test_a_planted_mistake_that_does_not_show_is_a_failure(recorded, run, folder):
    """The CPU in a GPU's place runs the right kernels whatever was compiled: nothing can show."""
    write(recorded, folder / "good.npz")
    done = run(folder / "good.npz", "--planted")
    assert done.returncode == 1
    assert "planted, --fmad=true: the same machine code, 0 launches differ" in done.stdout
    assert done.stdout.splitlines()[-1] == "FAILED: 0 of 8 planted mistakes show"


@pytest.mark.parametrize(
    "right, wrong",
    [("return a / b;", "return a * (1.0f / b);"), ("return VOX_FMA(a, b, c);", "return a * b + c;")],
    ids=["division", "fma"],
)
def test_the_vectors_notice_what_a_compiler_might_do(recorded, run, folder, right, wrong):
    """An approximate division, a fused operation in two: on a device that does so, it fails."""
    write(recorded, folder / "good.npz")
    source = grid_source("cuda")
    assert source.count(right) == 1
    units = (shim.RUNNER, shim.HERE / "cuda_driver.cpp")
    device = shim.build(folder, source.replace(right, wrong), "cuda", units=units, optimise="-O0")
    done = run(folder / "good.npz", VOX_LIBCUDA=str(device))
    assert done.returncode == 1
    assert int(re.search(r"FAILED: .* kernels, (\d+) differ", done.stdout)[1]) > 50


def test_what_cannot_be_run_is_said(recorded, run, folder):
    write(recorded, folder / "good.npz")
    done = run(folder / "good.npz", VOX_LIBCUDA="libcuda-that-is-not-here.so")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no NVIDIA driver here" in done.stderr and "no kernel was run" in done.stderr
    done = run(folder / "none.npz")
    assert done.returncode == 2 and "none.npz" in done.stderr


def test_a_compiler_s_complaint_is_shown(recorded, run, folder):
    write(recorded, folder / "good.npz")
    refusing = folder / "refusing"
    refusing.mkdir()
    (refusing / "nvcc").write_text('#!/bin/sh\necho "grid.cu(7): error: no such thing" >&2\nexit 1\n')
    (refusing / "nvcc").chmod(0o755)
    done = run(folder / "good.npz", PATH=os.pathsep.join([str(refusing), os.environ["PATH"]]))
    assert done.returncode == 2
    assert "nvcc refused the kernel source" in done.stderr and "no such thing" in done.stderr


def test_the_group_and_the_options_are_in_the_file(recorded, folder):
    write(recorded, folder / "good.npz")
    about = json.loads(np.load(folder / "good.npz")["about"].tobytes())
    assert (about["group"], about["numerics"]) == (128, 1)
    assert "--ftz=true" in about["options"] and "--fmad=false" in about["options"]
