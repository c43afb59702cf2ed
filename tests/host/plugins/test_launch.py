"""From a candidate to a verified plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vox_host.discovery import discover_installed
from vox_host.errors import IntegrityError, PluginError
from vox_host.installation import Installed
from vox_host.launch import plan_launch, with_verified_bytes
from vox_host.resolution import Candidate, Problem


@pytest.fixture
def candidate(installed_toy: Installed, plugins_dir: Path) -> Candidate:
    return discover_installed(plugins_dir)[0]


def tampered(candidate: Candidate) -> Path:
    assert candidate.tree is not None
    assert candidate.receipt is not None
    path = candidate.tree / candidate.receipt.packages / "vox_toy" / "__init__.py"
    path.write_text(path.read_text().replace("imported", "Imported"))
    return path


def test_a_plan_names_the_plugin_s_own_interpreter(candidate: Candidate, plugins_dir: Path) -> None:
    plan = plan_launch(candidate, plugins_dir=plugins_dir, log_dir=plugins_dir / "log")
    assert (plan.plugin_id, plan.plugin_version) == ("vox-toy", "1.0.0")
    assert candidate.tree is not None
    assert plan.python == candidate.tree / "bin" / "python"
    assert plan.manifest_digest == candidate.manifest_digest


def test_a_changed_byte_stops_the_start(candidate: Candidate, plugins_dir: Path) -> None:
    path = tampered(candidate)
    with pytest.raises(IntegrityError) as caught:
        plan_launch(candidate, plugins_dir=plugins_dir, log_dir=plugins_dir)
    assert caught.value.exit_code == 4
    assert dict(caught.value.facts)["file"] == str(path)


def test_a_development_install_starts_with_a_logged_warning(
    candidate: Candidate, plugins_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan_launch(candidate, plugins_dir=plugins_dir, log_dir=plugins_dir)
    assert any("plugin.unverified id=vox-toy" in record.getMessage() for record in caplog.records)


def test_a_development_install_is_refused_where_verified_is_required(
    candidate: Candidate, plugins_dir: Path
) -> None:
    with pytest.raises(IntegrityError) as caught:
        plan_launch(candidate, plugins_dir=plugins_dir, log_dir=plugins_dir, require_verified=True)
    assert caught.value.code == "not-verified"


@pytest.mark.parametrize(("stage", "error"), [("integrity", IntegrityError), ("start", PluginError)])
def test_a_candidate_with_a_problem_is_not_planned(
    candidate: Candidate, plugins_dir: Path, stage: str, error: type[Exception]
) -> None:
    broken = replace(candidate, problem=Problem(stage=stage, code="some-code", detail="why"))  # type: ignore[arg-type]
    with pytest.raises(error, match="why"):
        plan_launch(broken, plugins_dir=plugins_dir, log_dir=plugins_dir)


def test_explaining_checks_bytes_and_keeps_the_reason(candidate: Candidate, plugins_dir: Path) -> None:
    assert with_verified_bytes([candidate], plugins_dir)[0].problem is None
    tampered(candidate)
    problem = with_verified_bytes([candidate], plugins_dir)[0].problem
    assert problem is not None
    assert (problem.stage, problem.code) == ("integrity", "integrity-mismatch")
    assert problem.detail.count("sha256:") == 2
