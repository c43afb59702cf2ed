"""The native library on another architecture: cross-compiled with zig, run under qemu."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "plugins/mens-cpu-ref/native"
BUILDS = NATIVE.parent / "build"
"""Kept: a second run compiles only what changed."""

pytestmark = pytest.mark.timeout(900)


def build(folder: Path, *arguments: str) -> Path:
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    for command in (
        [cmake, "-S", str(NATIVE), "-B", str(folder), "-DVOX_BUILD_PARITY=ON", *arguments],
        [cmake, "--build", str(folder), "--target", "vox_parity", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "vox_parity"


@pytest.fixture(scope="module")
def arm():
    """How to run an aarch64 program: the emulator and a folder with the programs."""
    qemu = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
    missing = [
        name
        for name, here in (
            ("qemu-aarch64 (Debian: qemu-user-static)", qemu is not None),
            ("the ziglang wheel", importlib.util.find_spec("ziglang") is not None),
        )
        if not here
    ]
    if missing:
        pytest.skip(f"aarch64 is not checked: {' and '.join(missing)} not found")
    folder = BUILDS / "aarch64"
    folder.mkdir(parents=True, exist_ok=True)
    zig = folder / "zig-c++"
    zig.write_text(
        f'#!/bin/sh\nexec "{sys.executable}" -m ziglang c++ -target aarch64-linux-musl -mcpu=generic "$@"\n'
    )
    zig.chmod(0o755)
    programs = build(
        folder,
        "-DCMAKE_SYSTEM_NAME=Linux",
        "-DCMAKE_SYSTEM_PROCESSOR=aarch64",
        f"-DCMAKE_CXX_COMPILER={zig}",
    )
    return lambda *command, cpu="max": [qemu, "-cpu", cpu, programs.with_name(command[0]), *command[1:]]


@pytest.fixture(scope="module")
def here():
    """This machine's programs."""
    programs = build(BUILDS / "here")
    return lambda *command: [programs.with_name(command[0]), *command[1:]]


def run(command, status=0):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=500)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def digests_here(library, here):
    return run(here("vox_parity")).stdout


@pytest.mark.parametrize("isa", ["neon", "neon_dot"])
def test_aarch64_gives_the_bytes_of_this_machine(arm, digests_here, isa):
    """Every line is the digest of one operator's outputs; the reference is compared on the way."""
    done = run(arm("vox_parity", isa))
    assert done.stderr == f"instruction set: {isa}\n"
    assert done.stdout == digests_here


def test_every_operator_is_in_the_comparison(digests_here):
    """All that the native library exports for a model's steps."""
    headers = (NATIVE / "abi.h").read_text() + (NATIVE / "quant_abi.h").read_text()
    operators = set(re.findall(r"VOX_API int64_t prefix##_(\w+)\(", headers))
    source = (NATIVE / "parity/parity.cpp").read_text()
    unused = {
        name for name in operators if not re.search(rf"\bvox_{name}\b|COMPARE\([^;]*?\b{name},", source)
    }
    assert not unused
    assert len(digests_here.splitlines()) > 70


@pytest.mark.parametrize("cpu, isa", [("cortex-a57", "neon"), ("max", "neon_dot")])
def test_the_best_instruction_set_is_chosen(arm, cpu, isa):
    """A Cortex-A57 has no integer dot product; asking for it is refused, not an illegal instruction."""
    assert run(arm("vox_parity", cpu=cpu)).stderr == f"instruction set: {isa}\n"
    if isa == "neon":
        assert "not here" in run(arm("vox_parity", "neon_dot", cpu=cpu), status=2).stderr


def test_the_excluded_interval_just_below_the_smallest_normal(arm, here, library):
    """Arm looks for a tiny result before it rounds, x86 after: the one difference, outside the claim."""
    assert run(arm("vox_parity", "interval")).stdout == "kernel 00000000, reference 00000000\n"
    if platform.machine() in ("x86_64", "AMD64"):
        assert run(here("vox_parity", "interval")).stdout == "kernel 00800000, reference 00800000\n"
