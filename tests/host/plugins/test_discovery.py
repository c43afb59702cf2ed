"""Finding plugins without importing any of them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import pytest
from plugin_toys import manifest_text, write_toy_wheel

from vox_host.discovery import discover, discover_in_environment, discover_installed
from vox_host.installation import Installed, InstallRequest, install
from vox_host.resolution import Candidate


def only(candidates: list[Candidate]) -> Candidate:
    assert len(candidates) == 1, [c.plugin_id for c in candidates]
    return candidates[0]


def problem_of(candidate: Candidate) -> tuple[str, str, str]:
    assert candidate.problem is not None
    return candidate.problem.stage, candidate.problem.code, candidate.problem.detail


def test_a_distribution_is_found_through_its_entry_point(unpacked: Callable[..., Path]) -> None:
    site = unpacked()
    candidate = only(discover_in_environment([str(site)]))
    assert (candidate.plugin_id, candidate.version, candidate.origin) == ("vox-toy", "1.0.0", "environment")
    assert candidate.location == str(site / "vox_toy" / "Plugin.toml")
    assert candidate.problem is None
    assert candidate.python == Path(sys.executable)


def test_no_plugin_code_is_imported(unpacked: Callable[..., Path]) -> None:
    # The toy raises SystemExit when it is imported, its parent package included.
    site = unpacked(entry_points="[vox_host.backends]\nvox-toy = vox_toy.deep.module:make\n")
    before = set(sys.modules)
    discover_in_environment([str(site)])
    assert "vox_toy" not in set(sys.modules) - before


def test_distributions_without_our_group_are_passed_over(unpacked: Callable[..., Path]) -> None:
    site = unpacked(entry_points="[console_scripts]\nvox_host_backends = vox_toy:make\n")
    assert discover_in_environment([str(site)]) == []


def test_a_broken_manifest_is_a_candidate_with_its_problem(unpacked: Callable[..., Path]) -> None:
    site = unpacked(manifest=manifest_text().replace(">=1,<2", "one"))
    stage, code, detail = problem_of(only(discover_in_environment([str(site)])))
    assert (stage, code) == ("manifest", "manifest-invalid")
    assert "plugin.protocol" in detail
    assert str(site / "vox_toy" / "Plugin.toml") in detail
    assert "vox-toy 1.0.0" in detail


def test_a_manifest_must_be_in_the_list_of_files(unpacked: Callable[..., Path]) -> None:
    site = unpacked()
    record = site / "vox_toy-1.0.0.dist-info" / "RECORD"
    record.write_text("\n".join(line for line in record.read_text().splitlines() if ".toml" not in line))
    assert problem_of(only(discover_in_environment([str(site)])))[1] == "manifest-missing"
    record.unlink()
    assert problem_of(only(discover_in_environment([str(site)])))[1] == "manifest-missing"


def test_a_manifest_that_is_listed_but_gone_is_a_problem(unpacked: Callable[..., Path]) -> None:
    site = unpacked()
    (site / "vox_toy" / "Plugin.toml").unlink()
    candidate = only(discover_in_environment([str(site)]))
    assert candidate.problem is not None


def test_an_editable_installation_is_read_from_its_sources(
    unpacked: Callable[..., Path], tmp_path: Path
) -> None:
    site = unpacked()
    source = tmp_path / "source tree" / "src"
    source.mkdir(parents=True)
    shutil.move(site / "vox_toy", source / "vox_toy")
    info = site / "vox_toy-1.0.0.dist-info"
    (info / "RECORD").write_text("vox_toy.pth,,\n")
    url = source.parent.as_uri()
    (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {"editable": True}}))
    candidate = only(discover_in_environment([str(site)]))
    assert candidate.problem is None
    assert candidate.location == str(source / "vox_toy" / "Plugin.toml")


def test_a_stale_egg_info_is_explained_and_does_not_shadow(unpacked: Callable[..., Path]) -> None:
    site = unpacked()
    stale = site / "vox_toy.egg-info"
    stale.mkdir()
    (stale / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: vox-toy\nVersion: 0.9\n")
    (stale / "entry_points.txt").write_text("[vox_host.backends]\nvox-toy = vox_toy:make\n")
    candidate = only(discover_in_environment([str(site)]))
    assert (candidate.version, candidate.problem) == ("1.0.0", None)
    assert any("vox_toy.egg-info is stale" in note for note in candidate.notes)


def test_two_versions_in_one_folder_are_both_named_and_none_is_used(unpacked: Callable[..., Path]) -> None:
    site = unpacked()
    unpacked(version="1.1.0")
    stage, code, detail = problem_of(only(discover_in_environment([str(site)])))
    assert (stage, code) == ("found", "claimed-twice")
    assert "vox_toy-1.0.0.dist-info" in detail
    assert "vox_toy-1.1.0.dist-info" in detail


def test_the_first_folder_on_the_path_wins_and_the_other_is_told(unpacked: Callable[..., Path]) -> None:
    first, second = unpacked("first"), unpacked("second", version="2.0.0")
    candidate = only(discover_in_environment([str(first), str(second)]))
    assert candidate.version == "1.0.0"
    assert any("vox_toy-2.0.0" in note for note in candidate.notes)
    assert only(discover_in_environment([str(second), str(first)])).version == "2.0.0"


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_an_id_belongs_to_the_distribution_of_that_name(
    unpacked: Callable[..., Path], order: tuple[str, str]
) -> None:
    folders = {
        "a": unpacked("a"),
        "b": unpacked(
            "b", plugin_id="vox-impostor", entry_points="[vox_host.backends]\nvox-toy = vox_impostor:make\n"
        ),
    }
    candidate = only(discover_in_environment([str(folders[name]) for name in order]))
    assert candidate.problem is None
    assert candidate.location.startswith(str(folders["a"]))
    assert any("vox-impostor 1.0.0" in note for note in candidate.notes)


def test_a_name_that_nobody_owns_is_broken(unpacked: Callable[..., Path]) -> None:
    site = unpacked(entry_points="[vox_host.backends]\nvox-other = vox_toy:make\n")
    candidate = only(discover_in_environment([str(site)]))
    assert candidate.plugin_id == "vox-other"
    assert problem_of(candidate)[1] == "name-not-owned"


# --- the plugin folder ---------------------------------------------------------------------------


def test_an_installed_plugin_is_found_by_its_receipt(installed_toy: Installed, plugins_dir: Path) -> None:
    candidate = only(discover_installed(plugins_dir))
    assert (candidate.plugin_id, candidate.origin, candidate.problem) == ("vox-toy", "installed", None)
    assert candidate.python is not None
    assert candidate.python.is_file()
    assert candidate.manifest_digest == installed_toy.receipt.manifest_digest


def test_an_environment_without_receipt_is_invisible(installed_toy: Installed, plugins_dir: Path) -> None:
    (plugins_dir / "vox-toy.json").unlink()
    assert discover_installed(plugins_dir) == []


def test_no_plugin_folder_is_no_plugin(tmp_path: Path) -> None:
    assert discover_installed(tmp_path / "nowhere") == []


def test_a_damaged_receipt_is_a_broken_plugin(plugins_dir: Path) -> None:
    plugins_dir.mkdir(parents=True)
    (plugins_dir / "vox-toy.json").write_text("{")
    candidate = only(discover_installed(plugins_dir))
    assert candidate.plugin_id == "vox-toy"
    assert problem_of(candidate)[:2] == ("integrity", "receipt-invalid")


def test_a_changed_manifest_is_a_matter_of_integrity_before_it_is_parsed(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    receipt = installed_toy.receipt
    path = plugins_dir / receipt.environment / receipt.manifest
    path.write_text("not even TOML [")
    stage, code, detail = problem_of(only(discover_installed(plugins_dir)))
    assert (stage, code) == ("integrity", "integrity-mismatch")
    assert receipt.manifest_digest in detail


def test_a_plugin_without_the_worker_loop_says_so_before_it_is_started(
    tmp_path: Path, request_for: Callable[..., InstallRequest], plugins_dir: Path
) -> None:
    install(request_for(write_toy_wheel(tmp_path / "wheels")))
    stage, code, detail = problem_of(only(discover_installed(plugins_dir)))
    assert (stage, code) == ("start", "no-worker")
    assert "vox_plugin_api" in detail


def test_an_installed_plugin_goes_before_one_beside_the_host(
    installed_toy: Installed, plugins_dir: Path, unpacked: Callable[..., Path]
) -> None:
    candidate = only(discover(plugins_dir, [str(unpacked(version="9.0.0"))]))
    assert (candidate.origin, candidate.version) == ("installed", "1.0.0")
    assert any("not used" in note for note in candidate.notes)


def test_fifty_plugins_some_broken_are_listed_in_half_a_second_without_imports(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    receipt = json.loads((plugins_dir / "vox-toy.json").read_text())
    tree = plugins_dir / receipt["environment"]
    text = (tree / receipt["manifest"]).read_text()
    for number in range(49):
        plugin_id = f"vox-toy-{number}"
        environment = f".environments/{plugin_id}-00000000"
        manifest = plugins_dir / environment / receipt["manifest"]
        manifest.parent.mkdir(parents=True)
        (plugins_dir / environment / receipt["packages"] / "vox_plugin_api").mkdir(exist_ok=True)
        own = text.replace('"vox-toy"', f'"{plugin_id}"')
        if number % 5 == 0:
            own = own.replace("schema = 1", "schema = 9")
        manifest.write_text(own)
        record = {**receipt, "plugin": plugin_id, "environment": environment, "receipt_digest": None}
        record["manifest_digest"] = sha256(own.encode()).hexdigest()
        (plugins_dir / f"{plugin_id}.json").write_text("{" if number % 7 == 0 else json.dumps(record))
    program = (
        "import sys; from vox_host.cli import run; status = run(['plugin', 'list', '--json']);"
        "bad = {'torch', 'numpy', 'aiohttp', 'vox_toy', 'mens_core', 'mens_cpu_ref'} & set(sys.modules);"
        "sys.exit(f'imported {bad}' if bad else status)"
    )
    command = [sys.executable, "-c", program]
    best_s, output = float("inf"), b""
    for _ in range(3):
        # The process's own time: what else the machine does meanwhile is not the program's.
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, env=environment_with(plugins_dir), capture_output=True, check=False)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best_s = min(best_s, used_s)
        assert done.returncode == 0, done.stderr.decode()
        output = done.stdout
    listed = {p["id"]: p for p in json.loads(output)["plugins"] if p["id"].startswith("vox-toy")}
    assert len(listed) == 50
    assert listed["vox-toy-0"]["error"]["code"] == "receipt-invalid"
    assert listed["vox-toy-5"]["error"]["code"] == "manifest-invalid"
    assert listed["vox-toy-1"]["error"] is None
    assert best_s < 0.5, f"took {best_s:.3f} s"


def environment_with(plugins_dir: Path) -> dict[str, str]:
    return {**os.environ, "VOX_HOME": str(plugins_dir.parent), "PYTHONPATH": os.pathsep.join(sys.path)}
