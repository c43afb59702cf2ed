"""A plugin of ours that is not installed and can't be here: one sentence says so, whoever is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.tiny_home import add_tiny_model
from vox_host.errors import NoCandidateError
from vox_host.hardware.system import System
from vox_host.manifest import load_manifest
from vox_host.parity.run import find_candidate
from vox_host.resolution.known import KNOWN, why_not_here

ROOT = Path(__file__).parents[3]
SENTENCE = 'plugin "mens-torch-mps" can\'t run here: it needs macos, and this is linux; nothing was started'
MANIFESTS = {path.parents[2].name: path for path in ROOT.glob("plugins/*/src/*/Plugin.toml")}


def test_what_is_known_is_what_the_manifests_say():
    assert {name: tuple(load_manifest(path)[0].requires.os) for name, path in MANIFESTS.items()} == KNOWN


def test_parity_says_it_too(monkeypatch):
    monkeypatch.setattr("vox_host.parity.run.System", lambda: System(os="linux"))
    with pytest.raises(NoCandidateError, match="it needs macos, and this is linux; nothing was started"):
        find_candidate([], "mens-torch-mps")


def test_parity_names_one_that_is_not_installed_as_all_others_do():
    with pytest.raises(NoCandidateError, match='plugin "vox-nope" is not installed'):
        find_candidate([], "vox-nope")


def test_only_where_it_can_never_run():
    sentence = 'plugin "mens-torch-mps" can\'t run here: it needs macos, and this is linux'
    assert why_not_here("mens-torch-mps", "linux") == sentence
    assert why_not_here("mens-torch-mps", "macos") is None
    assert why_not_here("mens-cpu-ref", "linux") is None
    assert why_not_here("of-someone-else", "linux") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the Metal lane can be installed on macOS")
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (
            ("plugin", "install", "--path", "plugins/mens-torch-mps"),
            3,
            "plugin 'mens-torch-mps' needs macos; this is linux; nothing was installed",
        ),
        (
            ("generate", "--plugin", "mens-torch-mps", "--model", "gemma3", "--prompt", "x"),
            3,
            SENTENCE,
        ),
        (("plugin", "check", "mens-torch-mps"), 3, SENTENCE),
        (("plugin", "explain", "mens-torch-mps"), 3, SENTENCE),
    ],
)
def test_the_metal_lane_on_linux(arguments, status, said, tmp_path):
    add_tiny_model(tmp_path)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", "vox_host", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "VOX_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, said in done.stderr) == (status, True), done.stderr
    assert "Traceback" not in done.stderr
