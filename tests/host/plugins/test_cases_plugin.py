"""The plugin cases of tests/cases, by id: P1, P2, P3 and the texts of P6."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from plugin_toys import REPOSITORY, a_machine, interpreter_that_sees, manifest_text

from vox_host.discovery import discover_in_environment
from vox_host.errors import NoCandidateError, VoxError
from vox_host.hardware.record import Problem
from vox_host.installation import InstallRequest, install
from vox_host.launch import plan_launch
from vox_host.manifest import parse_manifest
from vox_host.resolution import Candidate, Request, StageRecord, resolve
from vox_host.workers import Supervisor

CASES = REPOSITORY / "tests" / "cases"
INDEX: list[dict[str, Any]] = json.loads((CASES / "INDEX.json").read_text())


def cases(case_id: str) -> list[Any]:
    found = [case for case in INDEX if case["kind"] == "plugin" and case["id"] == case_id]
    assert found
    return [pytest.param(case, id=f"{case_id}-{Path(case['file']).name}") for case in found]


def text_of(error: VoxError) -> str:
    return json.dumps(error.as_dict())


def mentions_all(text: str, case: dict[str, Any]) -> None:
    missing = [word for word in case["expect"]["must_mention"] if word not in text]
    assert not missing, text


def test_every_plugin_case_is_driven_here() -> None:
    assert {case["id"] for case in INDEX if case["kind"] == "plugin"} == {"P1", "P2", "P3", "P6"}


# --- P1: a plugin whose entry point raises ----------------------------------------------------------


@pytest.mark.parametrize("case", cases("P1"))
async def test_an_entry_point_that_raises_is_told_by_name_and_makes_auto_degraded(
    case: dict[str, Any], tmp_path: Path
) -> None:
    folder = CASES / case["file"]
    (found,) = discover_in_environment([str(folder)])
    candidate = replace(found, python=interpreter_that_sees(folder, tmp_path / "environment"))
    assert candidate.problem is None
    named = Request(plugin="vox-toy")
    chosen = resolve(named, a_machine(), [candidate]).chosen
    plan = plan_launch(chosen, plugins_dir=tmp_path / "plugins", log_dir=tmp_path / "log")
    with pytest.raises(VoxError) as caught:
        await Supervisor(plan).start()
    assert caught.value.exit_code != 0
    mentions_all(text_of(caught.value), case)

    # Auto: the same facts as one warning, and the CPU lane instead.
    assert case["expect"]["auto"].startswith("warning")
    cpu = Candidate(
        plugin_id="mens-cpu-ref",
        version="0.1.0",
        origin="installed",
        location="x",
        manifest=parse_manifest(manifest_text("mens-cpu-ref", "0.1.0").encode(), source="x"),
    )
    outcome = StageRecord(
        plugin_id="vox-toy",
        version=None,
        stage="start",
        status="failed",
        code=caught.value.code,
        detail=text_of(caught.value),
    )
    assert resolve(Request(), a_machine(), [cpu, candidate]).chosen is candidate
    fallback = resolve(Request(), a_machine(), [cpu, candidate], [outcome])
    assert fallback.chosen is cpu
    assert fallback.failed == ("vox-toy",)
    assert "vox_toy_native" in str(fallback.degraded_reason)


# --- P2: another protocol, or none --------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("P2"))
def test_another_protocol_is_refused_before_any_plugin_code_runs(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    monkeypatch.setenv("VOX_MARK", str(mark))
    folder = CASES / case["file"]
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="vox-toy"), a_machine(), discover_in_environment([str(folder)]))
    text = text_of(caught.value)
    mentions_all(text, case)
    assert "vox-toy" in text
    assert str(folder / "vox_toy_data" / "Plugin.toml") in text
    name = Path(case["file"]).name
    if name in ("P2_protocol_number", "P2_protocol_missing"):
        assert caught.value.code == "manifest-invalid"
        assert "protocol 0" not in text
    else:
        assert caught.value.code == "protocol-unsupported"
        assert json.dumps(">=99,<100" if name == "P2_protocol_99" else ">=0,<1")[1:-1] in text
        assert "this host protocol 1" in text
    assert not mark.exists()


@pytest.mark.parametrize("case", cases("P2"))
def test_the_command_line_refuses_it_too(case: dict[str, Any], tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    environment = {
        **os.environ,
        "VOX_HOME": str(tmp_path / "home"),
        "VOX_MARK": str(mark),
        "PYTHONPATH": os.pathsep.join([str(CASES / case["file"]), *(p for p in sys.path if p)]),
    }
    command = [sys.executable, "-m", "vox_host", "plugin", "explain", "vox-toy"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    mentions_all(done.stdout, case)
    assert "Nothing would run" in done.stdout
    assert not mark.exists()
    installed = subprocess.run(
        [*command[:-2], "install", "--path", str(CASES / case["file"])],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert installed.returncode == 3
    mentions_all(installed.stderr, case)
    assert not mark.exists()


# --- P3: artifacts and their checksums --------------------------------------------------------------


@pytest.mark.parametrize("case", cases("P3"))
def test_an_artifact_is_taken_or_refused_with_the_reason(
    case: dict[str, Any], request_for: Callable[..., InstallRequest], plugins_dir: Path, tmp_path: Path
) -> None:
    # The expectations are written for one platform, whatever this machine is.
    source = tmp_path / "case"
    shutil.copytree(CASES / case["file"], source)
    if not (source / "Plugin.toml").exists():
        source = next(source.glob("*/Plugin.toml")).parent
    request = request_for(source, os="linux", arch="x86_64", require_verified=True)
    if case["expect"]["kind"] == "value":
        assert install(request).receipt.trust == "verified"
        return
    with pytest.raises(VoxError) as caught:
        install(request)
    mentions_all(text_of(caught.value), case)
    assert not list(plugins_dir.glob("*.json"))


# --- P6: a GPU that is there and can't be used -----------------------------------------------------


@pytest.mark.parametrize("case", cases("P6"))
def test_an_unusable_gpu_is_refused_with_the_driver_s_own_sentence(case: dict[str, Any]) -> None:
    probe = json.loads((CASES / case["file"]).read_text())
    sentence = (CASES / probe["smi_text"]).read_text().strip()
    machine = a_machine(problems=(Problem(source="nvidia-smi", detail=sentence, remedy="Reboot."),))

    def candidate(plugin_id: str, lane: str, devices: tuple[str, ...]) -> Candidate:
        text = manifest_text(plugin_id, "0.1.0", lane=lane, devices=devices)
        return Candidate(
            plugin_id=plugin_id,
            version="0.1.0",
            origin="installed",
            location="x",
            manifest=parse_manifest(text.encode(), source="x"),
        )

    cuda = candidate("mens-torch-cuda", "cuda", ("nvidia :: compute_capability >= 8.0",))
    cpu = candidate("mens-cpu-ref", "cpu", ())
    assert case["expect"]["when"] == "--plugin mens-torch-cuda"
    with pytest.raises(NoCandidateError) as caught:
        resolve(Request(plugin="mens-torch-cuda"), machine, [cuda, cpu])
    mentions_all(text_of(caught.value), case)
    assert caught.value.remedy == "Reboot."
    resolution = resolve(Request(), machine, [cuda, cpu])
    assert resolution.chosen is cpu
    mentions_all(str(resolution.degraded_reason), case)
