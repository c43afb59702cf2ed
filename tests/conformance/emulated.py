"""The parity programs of the native library: for this machine, and for aarch64 under an emulator."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

NATIVE = Path(__file__).parents[2] / "plugins/mens-cpu-ref/native"
BUILDS = NATIVE.parent / "build"
"""Kept: a second run compiles only what changed."""

__all__ = ["BUILDS", "NATIVE", "build", "build_arm", "find_qemu", "missing_for_arm"]


def find_qemu() -> str | None:
    return shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def missing_for_arm() -> list[str]:
    """Return what aarch64 would need and is not here."""
    needs = (
        ("qemu-aarch64 (Debian: qemu-user-static)", find_qemu() is not None),
        ("the ziglang wheel", importlib.util.find_spec("ziglang") is not None),
    )
    return [name for name, is_here in needs if not is_here]


def build(folder: Path, *arguments: str) -> Path:
    """Build the programs; return the path of `vox_parity`, beside which the others lie."""
    cmake = shutil.which("cmake") or str(Path(sys.executable).with_name("cmake"))
    for command in (
        [cmake, "-S", str(NATIVE), "-B", str(folder), "-DVOX_BUILD_PARITY=ON", *arguments],
        [cmake, "--build", str(folder), "--target", "vox_parity", "vox_recompute", "--parallel", "2"],
    ):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "vox_parity"


def build_arm() -> Callable[..., list[str]]:
    """Cross-compile; return a function from a program and its arguments to a command that runs it."""
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

    def command(program: str, *arguments: object, cpu: str = "max") -> list[str]:
        return [str(find_qemu()), "-cpu", cpu, str(programs.with_name(program)), *map(str, arguments)]

    return command
