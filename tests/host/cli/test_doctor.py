"""`vox-host doctor` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CASES = Path(__file__).parents[2] / "cases"
PROBE = json.loads((CASES / "hand/plugin/P6_probe.json").read_text())


def run_doctor(tmp_path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "VOX_HOME": str(tmp_path / "home"),
        **environment,
    }
    command = [sys.executable, "-m", "vox_host", *PROBE["argv"], *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=variables, timeout=60, check=False)


@pytest.fixture
def broken_driver(tmp_path: Path) -> dict[str, str]:
    """An environment in which nvidia-smi says what case P6 records."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = (CASES / "tools/nvidia-smi").read_text().split("\n", 1)[1]
    (folder / "nvidia-smi").write_text(f"#!{sys.executable}\n{script}")
    (folder / "nvidia-smi").chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "FAKE_SMI_TEXT": str(CASES / PROBE["smi_text"]),
        "FAKE_SMI_EXIT": str(PROBE["smi_exit"]),
    }


@pytest.mark.skipif(sys.platform != "linux", reason="nvidia-smi is asked on Linux")
def test_a_broken_driver_is_shown_with_its_words_and_the_status_says_so(tmp_path, broken_driver):
    done = run_doctor(tmp_path, **broken_driver)
    assert done.returncode == 3
    assert "Driver/library version mismatch" in done.stdout + done.stderr
    facts = json.loads(run_doctor(tmp_path, "--json", **broken_driver).stdout)
    assert facts["healthy"] is False
    assert facts["machine"]["devices"] == []
    assert "Driver/library version mismatch" in facts["machine"]["problems"][0]["detail"]


def test_without_any_plugin_it_says_what_to_do_next(tmp_path):
    done = run_doctor(tmp_path)
    assert done.returncode == 3
    assert "nothing would run" in done.stdout and "vox-host plugin install --path" in done.stdout
    facts = json.loads(run_doctor(tmp_path, "--json").stdout)
    assert facts["chosen"] is None
    assert 0 < facts["budgets"]["cpu"] <= facts["machine"]["memory"]["available_bytes"]
