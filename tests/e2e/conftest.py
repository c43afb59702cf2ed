"""A home with the packed CPU lane installed and the demo model imported, once for all of e2e."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fixtures.demo_model import demo_gguf

ROOT = Path(__file__).parents[2]
MODEL = "gemma-3-270m"


@dataclass(frozen=True)
class Cli:
    """`vox-host` with a home of its own."""

    home: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    """Set beside the environment of the tests."""

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join(entry for entry in sys.path if entry)
        return {**os.environ, "PYTHONPATH": path, "VOX_HOME": str(self.home), **self.variables}

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "vox_host", *arguments]

    def run(
        self, *arguments: str, timeout: float = 120, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=timeout,
            input=stdin if stdin is not None else "",
            check=False,
        )

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command(*arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )


def install(cli: Cli) -> None:
    """Install the released folder that `make wheels` made."""
    if not (ROOT / "wheels/mens-cpu-ref/Plugin.toml").is_file():
        pytest.skip("wheels/mens-cpu-ref is not here; `make test` builds it")
    done = cli.run(
        *("plugin", "install", "--path", str(ROOT / "wheels/mens-cpu-ref")),
        *("--find-links", str(ROOT / "wheels"), "--constraint", str(ROOT / "constraints.txt")),
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def cli(tmp_path_factory: pytest.TempPathFactory) -> Cli:
    """The shared home; tests leave it as they found it."""
    gguf = demo_gguf()
    made = Cli(tmp_path_factory.mktemp("e2e") / "home")
    install(made)
    done = made.run("model", "import", str(gguf), "--name", MODEL, "--accept-license")
    assert done.returncode == 0, done.stderr
    return made
