"""Run the installers: uv where there is one, else pip and venv. Their output is kept for errors."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vox_host.errors import PluginError, UsageError, VoxError
from vox_host.ticker import PROGRESS_EVERY_S, ticking
from vox_host.tool_process import tool_process

__all__ = ["Report", "Tools", "find_tools", "run_tool"]

_Command = list[str | Path]
Report = Callable[[str], None]
"""Takes one line of progress."""

_TAIL_LINES = 25


@dataclass(frozen=True, kw_only=True, slots=True)
class Tools:
    """What builds environments on this machine."""

    python: Path
    """The interpreter that plugins get: the host's."""
    uv: Path | None
    environment: Mapping[str, str]
    """What the tools see."""
    find_links: tuple[Path, ...] = ()
    constraint: Path | None = None
    offline: bool = False
    """Use nothing but `find_links` and the tools' caches."""
    report: Report = field(default=lambda line: None)

    def create_environment(self, path: Path) -> None:
        """Make an empty environment at its final place: its files hold absolute paths."""
        if self.uv is not None:
            command: _Command = [self.uv, "venv", "--quiet", "--no-project", "--python", self.python, path]
        else:
            command = [self.python, "-m", "venv", "--without-pip", path]
        self._run(command, "creating its environment")

    def build_wheel(self, source: Path, destination: Path) -> Path:
        """Build `source` into a wheel in the empty folder `destination`."""
        if self.uv is not None:
            command: _Command = [self.uv, "build", "--wheel", "--python", self.python]
            command += ["--out-dir", destination, *self._index_options(), source]
        else:
            command = [*self._pip(), "wheel", "--no-deps", "--wheel-dir", destination]
            command += [*self._index_options(), source]
        self._run(command, f"building {source.name}")
        wheels = sorted(destination.glob("*.whl"))
        if len(wheels) != 1:
            raise PluginError(
                "build-failed",
                f"building {source} gave {len(wheels)} wheels instead of one; nothing was installed",
                facts=[("wheels", ", ".join(wheel.name for wheel in wheels) or "none")],
                remedy="The project's build has to make one wheel: its pyproject.toml says how.",
            )
        return wheels[0]

    def install_wheels(self, environment: Path, wheels: Sequence[Path]) -> None:
        """Place wheels, and what else they depend on, into an environment."""
        python = environment / "bin" / "python"
        if self.uv is not None:
            # Copies, not links into uv's cache: a byte changed here must not change the cache.
            command: _Command = [
                self.uv,
                "pip",
                "install",
                "--quiet",
                "--link-mode",
                "copy",
                "--python",
                python,
                *self._refresh_options(),
            ]
        else:
            command = [*self._pip(), "--python", python, "install", "--quiet", "--no-compile"]
        command += self._index_options()
        if self.constraint is not None:
            command += ["--constraint", self.constraint]
        self._run([*command, *wheels], "installing it and what it depends on")

    def compile_modules(self, python: Path, folder: Path) -> None:
        """Compile every module now, so that starting a worker never writes into the tree."""
        # unchecked: the receipt covers sources and compiled files alike, and no time stamp is in them.
        command: _Command = [
            python,
            "-I",
            "-m",
            "compileall",
            "-q",
            "-j",
            "0",
            "--invalidation-mode",
            "unchecked-hash",
        ]
        # A package may ship files that are no Python of this version (templates, tests); its own affair.
        self._run([*command, folder], "compiling its modules", accept=(0, 1))

    def _pip(self) -> list[str | Path]:
        if importlib.util.find_spec("pip") is None:
            raise PluginError(
                "no-installer",
                "neither uv nor pip is here; nothing was installed",
                remedy="Install uv, or pip into this environment: python -m ensurepip",
            )
        return [self.python, "-m", "pip", "--disable-pip-version-check"]

    def _refresh_options(self) -> list[str | Path]:
        """Have uv look again at what lies in `find_links`; pip always does.

        uv knows a wheel found there by its name and would take a cached one for a rebuilt one
        of the same version.
        """
        names = {path.name.split("-", 1)[0] for folder in self.find_links for path in folder.glob("*.whl")}
        options: list[str | Path] = []
        for name in sorted(names):
            options += ["--refresh-package", name.replace("_", "-")]
        return options

    def _index_options(self) -> list[str | Path]:
        options: list[str | Path] = []
        for folder in self.find_links:
            options += ["--find-links", folder]
        if self.offline:
            options += ["--no-index"]
        return options

    def _run(self, command: Sequence[str | Path], what: str, accept: Sequence[int] = (0,)) -> None:
        run_tool(command, what, environment=self.environment, report=self.report, accept=accept)


def find_tools(environment: Mapping[str, str]) -> tuple[Path, Path | None]:
    """Return this interpreter and uv: on the PATH, or beside the interpreter."""
    python = Path(sys.executable)
    beside = python.with_name("uv")
    found = shutil.which("uv", path=environment.get("PATH", ""))
    if found is None and beside.is_file():
        found = str(beside)
    return python, Path(found) if found else None


def run_tool(
    command: Sequence[str | Path],
    what: str,
    *,
    environment: Mapping[str, str],
    report: Report,
    accept: Sequence[int] = (0,),
    progress_every_s: float = PROGRESS_EVERY_S,
) -> None:
    """Run one tool to its end, saying every few seconds that it still runs.

    Raises:
        PluginError: it can't be started or failed; the last lines of its output are in the facts.
        UsageError: the disk is full.
    """
    arguments = [str(part) for part in command]
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with contextlib.ExitStack() as stack:
        try:
            process = stack.enter_context(tool_process(arguments, environment, stderr=subprocess.STDOUT))
        except OSError as error:
            raise PluginError(
                "tool-unusable",
                f"{arguments[0]} can't be started: {error.strerror}; nothing was installed",
                facts=[("command", " ".join(arguments))],
                remedy="Make it a program that this user can start, or take it from the PATH.",
            ) from None
        stack.enter_context(ticking(report, what, progress_every_s))
        assert process.stdout is not None
        for raw in process.stdout:
            line = raw.decode("utf-8", "replace").rstrip()
            if line:
                tail.append(line)
        status = process.wait()
    if status not in accept:
        raise _failed(what, arguments, status, list(tail))


_KNOWN_CAUSES = (
    ("No space left on device", "disk-full", "Free some disk space and try again."),
    (
        "CMAKE_CXX_COMPILER",
        "no-compiler",
        "Install a C++ compiler (g++ or clang++), or install a wheel that is built already.",
    ),
    (
        "No module named 'pip'",
        "no-installer",
        "Install uv, or pip into this environment: python -m ensurepip",
    ),
)


def _failed(what: str, arguments: list[str], status: int, tail: list[str]) -> VoxError:
    code, remedy = "tool-failed", "The last lines are the tool's own; solve what they say and try again."
    text = "\n".join(tail)
    for sign, known_code, known_remedy in _KNOWN_CAUSES:
        if sign in text:
            code, remedy = known_code, known_remedy
            break
    ended = f"signal {-status}" if status < 0 else f"status {status}"
    facts = [("command", " ".join(arguments)), ("exit", ended)]
    facts.append(("output", text or "nothing was printed"))
    kind = UsageError if code == "disk-full" else PluginError
    return kind(code, f"{what} failed; nothing was installed", facts=facts, remedy=remedy)
