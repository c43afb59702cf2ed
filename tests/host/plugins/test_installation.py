"""Installing a wheel, and what is said of a path that holds nothing to install."""

from __future__ import annotations

import hashlib
import subprocess
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_toys import hidden, manifest_text, visible, write_api_wheel, write_toy_wheel, write_wheel

from vox_host.discovery import discover_installed
from vox_host.errors import IntegrityError, PluginError, UsageError
from vox_host.installation import Installed, InstallRequest, install
from vox_host.installation.tools import Tools
from vox_host.integrity import verify_installation

MakeRequest = Callable[..., InstallRequest]


def test_a_wheel_becomes_a_plugin_with_its_own_environment(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path, tools: Tools
) -> None:
    folder = tmp_path / "wheels"
    write_api_wheel(folder)
    wheel = write_toy_wheel(folder, requires=("vox-plugin-api==0.1.0",))
    installed = install(request_for(wheel, tools=tools))
    receipt = installed.receipt
    assert visible(plugins_dir) == ["vox-toy.json"]
    assert receipt.archive_sha256 == hashlib.sha256(wheel.read_bytes()).hexdigest()
    candidate = discover_installed(plugins_dir)[0]
    assert candidate.problem is None
    # The environment is whole and alone: its interpreter sees the plugin and not this host.
    assert candidate.python is not None
    program = "import importlib.util as u; print([bool(u.find_spec(n)) for n in ('vox_toy', 'vox_host')])"
    done = subprocess.run([candidate.python, "-I", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[True, False]"


def test_starting_python_in_the_environment_changes_nothing_in_it(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    candidate = discover_installed(plugins_dir)[0]
    assert candidate.python is not None
    program = "import vox_plugin_api\ntry:\n import vox_toy\nexcept SystemExit: pass"
    subprocess.run([candidate.python, "-I", "-c", program], check=True)
    verify_installation(installed_toy.receipt, plugins_dir, full=True)


def test_a_wheel_without_released_manifest_is_a_development_install_and_says_so(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    wheel = write_toy_wheel(tmp_path)
    installed = install(request_for(wheel))
    assert installed.receipt.trust == "development"
    assert any("no checksum" in warning for warning in installed.warnings)
    with pytest.raises(IntegrityError) as caught:
        install(request_for(wheel, require_verified=True))
    assert caught.value.code == "not-verified"


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({"entry_points": ""}, "manifest-invalid", "vox_host.backends"),
        ({"manifest": manifest_text(version="2.0")}, "manifest-invalid", "plugin.version"),
        ({"manifest": manifest_text("vox-other")}, "manifest-invalid", "plugin.id"),
        ({"manifest": "schema = ["}, "manifest-invalid", "TOML"),
        ({"files": {"vox_toy/more/Plugin.toml": ""}}, "manifest-twice", "vox_toy/more/Plugin.toml"),
        ({"manifest": manifest_text(protocol=">=99,<100")}, "protocol-unsupported", ">=99,<100"),
        ({"tag": "cp27-cp27m-win32"}, "wheel-for-another-platform", "cp27-cp27m-win32"),
    ],
)
def test_a_wheel_that_can_t_run_here_is_refused_before_anything_is_placed(
    tmp_path: Path,
    request_for: MakeRequest,
    plugins_dir: Path,
    changes: dict[str, object],
    code: str,
    word: str,
) -> None:
    wheel = write_toy_wheel(tmp_path / "wheels", **changes)  # type: ignore[arg-type]
    with pytest.raises(PluginError) as caught:
        install(request_for(wheel))
    assert caught.value.code == code
    assert word in f"{caught.value.message} {caught.value.facts}"
    assert (visible(plugins_dir), hidden(plugins_dir)) == ([], [])


def change_behind_the_record(wheel: Path, old: str, new: str) -> None:
    """Change a whole file inside a wheel, as long as it was, so that only its RECORD knows."""
    data = wheel.read_bytes()
    # The archive itself stays whole: the file is stored, not compressed, and its checksum goes along.
    assert data.count(old.encode()) == 1
    data = data.replace(old.encode(), new.encode())
    before, after = (zlib.crc32(text.encode()).to_bytes(4, "little") for text in (old, new))
    wheel.write_bytes(data.replace(before, after))


def test_a_wheel_whose_contents_are_not_its_record_s_is_refused(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    wheel = write_toy_wheel(tmp_path / "wheels")
    change_behind_the_record(wheel, "raise SystemExit('imported')\n", "raise SystemExit('Imported')\n")
    with pytest.raises(IntegrityError) as caught:
        install(request_for(wheel))
    assert caught.value.code == "wheel-record-mismatch"
    assert "vox_toy/__init__.py" in str(caught.value.facts)
    assert hidden(plugins_dir) == []


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"not a zip at all"])
def test_a_file_that_is_no_wheel_is_said_to_be_none(
    tmp_path: Path, request_for: MakeRequest, data: bytes
) -> None:
    path = tmp_path / "vox_toy-1.0.0-py3-none-any.whl"
    path.write_bytes(data)
    with pytest.raises(PluginError) as caught:
        install(request_for(path))
    assert caught.value.code == "wheel-unreadable"


def test_a_wheel_without_a_proper_name_is_refused(tmp_path: Path, request_for: MakeRequest) -> None:
    wheel = write_toy_wheel(tmp_path).rename(tmp_path / "toy.whl")
    with pytest.raises(PluginError):
        install(request_for(wheel))


def test_the_receipt_names_every_distribution_with_the_digest_of_its_record(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    receipt = installed_toy.receipt
    assert [(d.name, d.version) for d in receipt.distributions] == [
        ("vox-plugin-api", "0.1.0"),
        ("vox-toy", "1.0.0"),
    ]
    for distribution in receipt.distributions:
        record = plugins_dir / receipt.environment / distribution.record
        assert hashlib.sha256(record.read_bytes()).hexdigest() == distribution.record_sha256


def test_a_dependency_that_is_not_what_its_record_says_is_refused(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path, tools: Tools
) -> None:
    folder = tmp_path / "wheels"
    beside = write_wheel(folder, "vox-beside", "1.0", {"vox_beside.py": "good = True \n"})
    change_behind_the_record(beside, "good = True \n", "good = False\n")
    wheel = write_toy_wheel(folder, requires=("vox-beside==1.0",))
    with pytest.raises(IntegrityError) as caught:
        install(request_for(wheel, tools=tools))
    assert caught.value.code == "distribution-mismatch"
    facts = dict(caught.value.facts)
    assert "vox_beside.py" in facts["file"]
    assert facts["found"] == f"sha256:{hashlib.sha256(b'good = False' + bytes([10])).hexdigest()}"
    assert (visible(plugins_dir), hidden(plugins_dir)) == ([], [])


def test_a_dependency_comes_from_the_folder_of_the_wheel(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = tmp_path / "wheels"
    write_wheel(folder, "vox-beside", "1.0", {"vox_beside.py": ""})
    installed = install(request_for(write_toy_wheel(folder, requires=("vox-beside==1.0",))))
    assert installed.receipt.plugin == "vox-toy"


@pytest.mark.parametrize("kind", ["nothing", "text", "empty folder", "manifest alone"])
def test_a_path_that_holds_nothing_installable_says_what_would_do(
    tmp_path: Path, request_for: MakeRequest, kind: str
) -> None:
    path = tmp_path / "x"
    if kind == "text":
        path.write_text("hello")
    elif kind != "nothing":
        path.mkdir()
    if kind == "manifest alone":
        (path / "Plugin.toml").write_text(manifest_text())
    with pytest.raises(UsageError) as caught:
        install(request_for(path))
    assert "nothing was installed" in caught.value.message
    assert "wheel" in str(caught.value.remedy)
