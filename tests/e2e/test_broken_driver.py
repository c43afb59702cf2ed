"""Case P6 through the command line: a GPU whose driver was updated without a reboot."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
from pathlib import Path

import pytest

from e2e.conftest import MODEL, install
from e2e.serving import serving
from host.plugins.plugin_toys import manifest_text, write_toy_wheel

CASES = Path(__file__).parents[1] / "cases"
[CASE] = [case for case in json.loads((CASES / "INDEX.json").read_text()) if case["id"] == "P6"]
PROBE = json.loads((CASES / CASE["file"]).read_text())
[SENTENCE] = CASE["expect"]["must_mention"]
ASK = ("generate", "--model", MODEL, "--prompt", "Hello", "--temperature", "0", "--max-tokens", "4")

pytestmark = [
    pytest.mark.real_model,
    pytest.mark.skipif(sys.platform != "linux", reason="nvidia-smi is asked on Linux"),
]


@pytest.fixture(scope="module")
def broken(cli, tmp_path_factory):
    """A home with the CPU lane and a CUDA plugin, on a machine whose nvidia-smi says what P6 records."""
    folder = tmp_path_factory.mktemp("broken-driver")
    variables = {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "FAKE_SMI_TEXT": str(CASES / PROBE["smi_text"]),
        "FAKE_SMI_EXIT": str(PROBE["smi_exit"]),
    }
    script = (CASES / "tools/nvidia-smi").read_text().split("\n", 1)[1]
    (folder / "bin").mkdir()
    (folder / "bin/nvidia-smi").write_text(f"#!{sys.executable}\n{script}")
    (folder / "bin/nvidia-smi").chmod(0o755)
    here = dataclasses.replace(cli, home=folder / "home", variables=variables)
    shutil.copytree(cli.home / "models", here.home / "models", copy_function=os.link)
    install(here)
    manifest = manifest_text(
        "mens-torch-cuda", "0.1.0", lane="cuda", devices=("nvidia :: compute_capability >= 8.0",)
    )
    # As the real one's: a plugin without canonical numerics would not be missed.
    manifest = manifest.replace('["fast"]', '["canonical", "fast"]')
    wheel = write_toy_wheel(folder / "toy", "mens-torch-cuda", "0.1.0", manifest=manifest)
    done = here.run("plugin", "install", "--path", str(wheel), "--no-index")
    assert done.returncode == 0, done.stderr
    return here


def test_the_doctor_fails_with_the_drivers_words_and_says_reboot(broken):
    done = broken.run(*PROBE["argv"])
    assert done.returncode != 0
    assert SENTENCE in done.stdout + done.stderr and "reboot" in done.stdout + done.stderr


def test_the_cuda_plugin_asked_for_by_name_is_refused_with_the_drivers_words(broken):
    assert CASE["expect"]["when"] == "--plugin mens-torch-cuda"
    for command in (ASK, ("serve", "--model", MODEL, "--port", "0")):
        done = broken.run(*command, "--plugin", "mens-torch-cuda")
        assert done.returncode not in (0, 1), done.stderr
        for words in ("mens-torch-cuda", SENTENCE, "reboot"):
            assert words in done.stderr, done.stderr
        assert done.stdout == ""


def test_auto_answers_on_the_cpu_and_warns_at_the_start_and_in_health(broken):
    done = broken.run(*ASK, "--json")
    assert done.returncode == 0, done.stderr
    assert "warning" in done.stderr and SENTENCE in done.stderr
    facts = json.loads(done.stdout)
    assert facts["lane"] == "cpu" and SENTENCE in facts["degraded"]
    with serving(broken, MODEL) as server:
        _, health = server.request("GET", "/health")
        assert "mens-torch-cuda" in health["degraded"] and SENTENCE in health["degraded"]
