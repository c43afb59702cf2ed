"""The native library on another architecture: cross-compiled with zig, run under qemu."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "plugins/mens-cpu-ref/native"


def build(folder: Path, *arguments: str) -> Path:
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    for command in (
        [cmake, "-S", str(NATIVE), "-B", str(folder), "-DVOX_BUILD_PARITY=ON", *arguments],
        [cmake, "--build", str(folder), "--target", "vox_parity", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "vox_parity"


@pytest.mark.timeout(600)
def test_aarch64_gives_the_bytes_of_this_machine(library, tmp_path):
    """Every line is the digest of one operator's outputs; the reference is compared on the way."""
    if importlib.util.find_spec("ziglang") is None or shutil.which("qemu-aarch64") is None:
        pytest.skip("needs the ziglang wheel and qemu-aarch64")
    zig = tmp_path / "zig-c++"
    zig.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -target aarch64-linux-musl "$@"\n')
    zig.chmod(0o755)
    arm = build(
        tmp_path / "arm",
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={zig}",
    )
    here = build(tmp_path / "here")
    outputs = [
        subprocess.run([*command], capture_output=True, text=True, timeout=300)
        for command in (["qemu-aarch64", arm], [here])
    ]
    for output in outputs:
        assert output.returncode == 0, output.stdout + output.stderr
    assert outputs[0].stdout == outputs[1].stdout
    assert len(outputs[0].stdout.splitlines()) > 50
