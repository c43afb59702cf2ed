"""The machine as the probes see it: files under a root, programs, environment.

Tests hand in a folder of recorded files and a PATH with a stand-in program; nothing else
differs from a real probe.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Output", "System"]

TOOL_TIMEOUT_S = 5.0
"""An idle NVIDIA driver needs 1.5 s to wake up; beyond this the tool hangs."""


@dataclass(frozen=True, slots=True)
class Output:
    """What a program printed. `status` is None where it could not be run to its end."""

    status: int | None
    text: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class System:
    """Where the probes look."""

    root: Path = Path("/")
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    os: str = field(
        default_factory=lambda: {"darwin": "macos"}.get(platform.system().lower(), platform.system().lower())
    )
    arch: str = field(default_factory=lambda: _arch(platform.machine()))

    def read(self, path: str) -> str | None:
        """Return the text of a file under the root, or None where it can't be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def find_program(self, name: str, *, also: Sequence[str] = ()) -> Path | None:
        """Return a program on PATH, or in one of the folders `also` under the root."""
        found = shutil.which(name, path=self.environ.get("PATH", ""))
        if found is not None:
            return Path(found)
        for folder in also:
            candidate = self.root / folder.lstrip("/") / name
            if os.access(candidate, os.X_OK):
                return candidate
        return None

    def run(self, program: Path, *arguments: str, timeout_s: float = TOOL_TIMEOUT_S) -> Output:
        """Run a program to its end within `timeout_s` seconds."""
        try:
            done = subprocess.run(
                [str(program), *arguments],
                capture_output=True,
                timeout=timeout_s,
                env=dict(self.environ),
                stdin=subprocess.DEVNULL,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return Output(None, "", f"{program.name} did not answer within {timeout_s:g} s")
        except OSError as error:
            return Output(None, "", f"{program} could not be started: {error.strerror}")
        text = done.stdout.decode("utf-8", "replace")
        return Output(done.returncode, text or done.stderr.decode("utf-8", "replace"))


def _arch(machine: str) -> str:
    machine = machine.lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
