"""The built wheels in an empty environment: no clone, no compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from e2e.conftest import MODEL, ROOT
from fixtures.demo_model import demo_gguf

pytestmark = [pytest.mark.real_model, pytest.mark.timeout(600)]
NEEDED = ("python3", "env", "sh", "uname", "git")
"""Programs that stay on PATH; no compiler is among them."""


def test_wheels_alone_serve_the_model_without_clone_or_compiler(tmp_path):
    gguf = demo_gguf()
    wheels = ROOT / "wheels"
    if not (wheels / "mens-cpu-ref/Plugin.toml").is_file():
        pytest.skip("wheels/ is not built; `make test` builds it")
    released = tmp_path / "released"
    shutil.copytree(wheels, released)
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in NEEDED:
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    environment = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "LANG", "LC_", "TMP")) and name != "PIP_CONSTRAINT"
    }
    environment |= {
        "PATH": str(programs),
        "HOME": str(tmp_path / "user"),
        "VOX_HOME": str(tmp_path / "home"),
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
    }
    if "HOME" in os.environ and (pip_config := Path(os.environ["HOME"], ".config/pip")).is_dir():
        shutil.copytree(pip_config, tmp_path / "user/.config/pip")

    def run(*command: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=400,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done

    assert not any(shutil.which(name, path=str(programs)) for name in ("cc", "gcc", "g++", "c++", "clang"))
    run(sys.executable, "-m", "venv", str(tmp_path / "venv"))
    python, vox = str(tmp_path / "venv/bin/python"), str(tmp_path / "venv/bin/vox-host")
    ours = [str(path) for path in released.glob("vox_*.whl")]
    assert len(ours) == 2, ours
    run(python, "-m", "pip", "install", "--quiet", *ours)
    imported = run(python, "-c", "import vox_host; print(vox_host.__file__)").stdout
    assert str(ROOT) not in imported
    run(vox, "plugin", "install", "--path", str(released / "mens-cpu-ref"), "--find-links", str(released))
    facts = json.loads(run(vox, "plugin", "show", "mens-cpu-ref", "--json").stdout)
    assert facts["integrity"] == "verified"
    run(vox, "model", "import", str(gguf), "--name", MODEL, "--accept-license")
    ask = ("--prompt", "Water boils at a temperature of", "--temperature", "0", "--max-tokens", "16")
    answer = json.loads(run(vox, "generate", "--model", MODEL, *ask, "--require-verified", "--json").stdout)
    assert answer["text"].startswith(" 100 degrees Celsius")
