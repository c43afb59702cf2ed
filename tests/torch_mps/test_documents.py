"""What the documents say of the Metal lane is what is here: lines of its own, certificates, a workflow."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from gpu.check_lane import OPERATORS
from gpu.training_checks import training_run
from grid_shim.check import ALL, SERVING
from mens_core.conformance.suite import cases_of
from metal_shim.stand_in import LABEL
from torch_mps import check_metal
from torch_mps.check_metal import NotedChecks, certificate, file_name

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "plugins/mens-torch-mps/src/mens_torch_mps/kernels"
CERTIFICATES = ROOT / "docs/certificates"


def code_lines(path):
    lines = path.read_text().splitlines()
    return sum(1 for line in lines if line.strip() and not line.lstrip().startswith("//"))


def test_the_documented_count_of_the_lane_s_own_lines_is_true():
    counts = {path.stem: code_lines(path) for path in KERNELS.glob("*.h")}
    row = (
        f"| Metal, for speed and for checks | {sum(counts.values())} | `mens_torch_mps/kernels`: "
        f"{counts['simd'] + counts['chunked']} that share an output among a SIMD group, "
        f"{counts['matrices']} of its matrices, {counts['write']} of uploads and copies, "
        f"{counts['tripwires']} of tripwires |"
    )
    assert row in (ROOT / "docs/architecture.md").read_text()


def unfit(text):
    """Why a file may not stand among the certificates; None: it may."""
    try:
        facts = json.loads(text)
    except ValueError:
        return "no certificate"
    if not isinstance(facts, dict) or facts.get("certificate") != 1 or "verdict" not in facts:
        return "no certificate"
    if facts["verdict"] == "partial":
        return "of a part"
    # A label by its field, or inside a lane's name, its facts, or a device's.
    labels = ("executed on", "in a gpu's place")
    if facts.get("execution") or any(label in text.lower() for label in labels):
        return "run elsewhere"
    return None


def certificates(folder):
    """By name, why each file of a folder that isn't its page may not stand there."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "README.md")
    return {
        path.name: unfit(path.read_text(errors="replace")) if path.suffix == ".json" else "not NAME.json"
        for path in files
    }


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, None),
        ({"certificate": None}, "no certificate"),
        ({"verdict": "partial"}, "of a part"),
        ({"execution": LABEL}, "run elsewhere"),
        ({"sides": [{"lane": f"metal ({LABEL})"}]}, "run elsewhere"),
        ({"observation": {"sides": {"a": {"load": {"lane": {"execution": LABEL}}}}}}, "run elsewhere"),
        ({"lane": {"device": "the CPU in a GPU's place"}}, "run elsewhere"),
    ],
)
def test_what_may_not_be_committed_is_told_whatever_its_kind(changed, why):
    """`make test-metal`'s kind says it in a field of its own, `vox-host parity`'s in its sides."""
    assert unfit(json.dumps({"certificate": 1, "verdict": "bitwise", "execution": "", **changed})) == why


def test_a_file_of_another_name_is_looked_at_too(tmp_path):
    right = json.dumps({"certificate": 1, "verdict": "bitwise", "execution": ""})
    labelled = json.dumps({"certificate": 1, "verdict": "bitwise", "execution": LABEL})
    (tmp_path / "older").mkdir()
    for name, text in (
        ("README.md", "the page"), ("m4.json", right), ("m4.json.txt", right), ("older/m5.JSON", labelled),
        ("m5.json", labelled), ("m6.json", "cut of"), ("m7.json", "[1]"),
    ):  # fmt: skip
        (tmp_path / name).write_text(text)
    assert certificates(tmp_path) == {
        "m4.json": None, "m4.json.txt": "not NAME.json", "m5.JSON": "not NAME.json",
        "m5.json": "run elsewhere", "m6.json": "no certificate", "m7.json": "no certificate",
    }  # fmt: skip


def test_nothing_is_certified_that_was_not_run_on_a_gpu():
    found = certificates(CERTIFICATES)
    assert {name: why for name, why in found.items() if why} == {}
    says_none = "**There is none so far.**" in (CERTIFICATES / "README.md").read_text()
    assert says_none == (not found), "the page says whether there are certificates"


def test_the_script_runs_what_the_documents_say(started, library, tmp_path, monkeypatch):
    """All names, and of them one step of training: the others are minutes on a CPU."""
    monkeypatch.setattr("sys.path", sys.path[:])
    asked = []

    class Listed(NotedChecks):
        def run(self, name, check):
            asked.append(name)
            super().run(name, check)

    def one_step(*lanes):
        return training_run(*lanes, steps=1, lengths=(2, 9))

    monkeypatch.setattr(check_metal, "training_run", one_step)
    checks = Listed(["training of tiny qwen3"])
    check_metal.run_all(checks, started(), tmp_path, layers=0)
    assert (checks.passed, checks.failed) == (1, 0)
    assert asked[:4] == ["quick vectors", "operators", "training vectors", "training operators"]
    assert {f"training of tiny {family}" for family in ("qwen3", "gemma3")} <= set(asked)


def test_the_documented_count_of_a_certificate_s_cases_is_true():
    suite = cases_of("operators")
    assert sum(name.removeprefix("suite/") in suite for name in OPERATORS) >= len(suite) > 80
    count = len(OPERATORS) + len(ALL) - len(SERVING)
    assert f"every operator on {count} cases, training included" in (ROOT / "docs/numerics.md").read_text()


def test_the_workflow_says_that_it_never_ran():
    assert (ROOT / ".github/workflows/macos.yml").read_text().startswith("# NEVER RUN YET.")


@pytest.mark.skipif(
    sys.platform == "darwin", reason="this machine may have an Apple GPU: make test-metal is for it"
)
def test_make_test_metal_says_that_it_ran_nothing():
    before = set(CERTIFICATES.iterdir())
    done = subprocess.run(
        [sys.executable, ROOT / "tests/torch_mps/check_metal.py"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("SKIPPED: the lane needs macOS, and this is Linux")
    assert "no check of the Metal lane was run, and no certificate was written" in done.stdout
    assert set(CERTIFICATES.iterdir()) == before


BARE = [sys.executable, "-S"]
"""This Python without what is installed for it."""


@pytest.mark.parametrize(
    ("script", "lane", "lacks"),
    [
        ("torch_mps/check_metal.py", "metal", "torch, numpy, pydantic, safetensors, packaging"),
        *(
            (f"gpu/{name}.py", "cuda", "torch, numpy, pydantic, safetensors")
            for name in ("check_lane", "check_ranks", "check_fast")
        ),
    ],
)
def test_a_bare_python_is_told_what_it_lacks(script, lane, lacks):
    arguments = ["--on-cpu"] if lane == "metal" else []
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*BARE, ROOT / "tests" / script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f"lacks {lacks}; nothing was checked" in done.stderr
    assert f"make test-{lane} {lane.upper()}_PYTHON=PATH" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.skipif(sys.platform == "darwin", reason="there it is what the Python lacks that counts")
def test_elsewhere_a_bare_python_hears_first_that_this_needs_macos():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script = ROOT / "tests/torch_mps/check_metal.py"
    done = subprocess.run([*BARE, script], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("SKIPPED: the lane needs macOS, and this is Linux")
    assert check_metal.NOTHING in done.stdout


def test_the_documented_way_without_a_mac_works_as_written(tmp_path):
    """The page's own line, with this Python for the one that `make` sets up."""
    home = tmp_path / "home"
    page = (CERTIFICATES / "README.md").read_text()
    (line,) = [line.strip() for line in page.splitlines() if "-m metal_shim.installed" in line]
    path, python, *command = line.split()
    assert (python, command[-1]) == (".venv/bin/python", "/tmp/metal-home")
    # What `make` installs into .venv comes from this clone here.
    path = f"{path.removeprefix('PYTHONPATH=')}:plugin-api/src:host/src"

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": path, "VOX_HOME": str(home)}
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )

    made = run(*command[:-1], home)
    assert made.returncode == 0, made.stderr
    assert f"metal ({LABEL})" in run("-m", "vox_host", "plugin", "list").stdout
    again = run(*command[:-1], home)
    assert (again.returncode, len(again.stderr.splitlines())) == (1, 1)
    assert f"VOX_HOME={command[-1]} .venv/bin/vox-host plugin check mens-torch-mps" in page


def test_nothing_that_the_lane_says_claims_equality_on_apple_s_gpus():
    """Not before a certificate does; a remedy may say what the CPU lane has."""
    sources = sorted((ROOT / "plugins/mens-torch-mps/src").rglob("*.py"))
    claims = [path.name for path in sources if "same bytes" in path.read_text()]
    assert sources and claims == []
    numerics = (ROOT / "docs/numerics.md").read_text()
    assert "Apple GPUs do nothing else" not in numerics
    assert "Apple GPUs: others saw two of them" in numerics


def test_the_environments_that_make_looks_for_are_ignored():
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    names = re.findall(r"\.venv-\w+", (ROOT / "Makefile").read_text())
    assert {".venv-cuda", ".venv-metal"} == set(names) and all(f"{name}/" in ignored for name in names)


def test_a_refused_variable_is_no_success(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["check_metal.py"])
    monkeypatch.setenv("PYTORCH_MPS_FAST_MATH", "1")
    assert check_metal.main() == 2
    said = capsys.readouterr().out
    assert said.startswith("REFUSED: PYTORCH_MPS_FAST_MATH=1") and check_metal.NOTHING in said


def test_a_certificate_says_what_ran_where(started):
    ready = started()
    for only, fails, verdict in (([], False, "bitwise"), ([], True, "failed"), (["first"], False, "partial")):
        checks = NotedChecks(only)
        checks.run("first", lambda: "35 cases")

        def second(fails=fails):
            assert not fails, "element 3 differs"
            return "2 models"

        checks.run("second", second)
        facts = json.loads(json.dumps(certificate(ready, checks)))
        assert facts["verdict"] == verdict
        assert facts["execution"] == "executed on CPU, not on Apple hardware"
        assert facts["checks"][0] == {"name": "first", "passed": True, "said": "35 cases"}
        assert [check["name"] for check in facts["checks"]] == ["first"] + ["second"] * (not only)
        assert {"chip", "os_build", "compiler", "numerics_version"} <= facts.keys()
    nothing = NotedChecks([])
    assert certificate(ready, nothing)["verdict"] == "failed", (
        "nothing that was compared is nothing that holds"
    )
    assert file_name({"chip": "Apple M4 Pro", "os_build": "24F74"}) == "metal-apple-m4-pro-24f74.json"
