"""Installing from each kind of path, and what is left when it does not work."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_toys import make_tools, manifest_text, write_api_wheel, write_toy_wheel, write_wheel

from vox_host.discovery import discover_installed
from vox_host.errors import IntegrityError, PluginError, UsageError
from vox_host.installation import Installed, InstallRequest, install, remove
from vox_host.installation.sources import digest_of_sources, find_sibling_sources
from vox_host.installation.tools import Tools
from vox_host.integrity import verify_installation
from vox_host.receipt import describe_trust

MakeRequest = Callable[..., InstallRequest]


def visible(plugins_dir: Path) -> list[str]:
    return sorted(p.name for p in plugins_dir.iterdir() if p.name[0] != ".")


def hidden(plugins_dir: Path) -> list[str]:
    names = [p.name for p in plugins_dir.glob(".environments/*")]
    return sorted(names + [p.name for p in plugins_dir.glob(".staging-*")])


def a_release(folder: Path, wheel: Path, platform: str = "linux-x86_64", manifest: str | None = None) -> Path:
    """Write a released manifest beside a wheel."""
    data = wheel.read_bytes()
    text = manifest_text() if manifest is None else manifest
    text += f'[artifacts.{platform}]\nfile = "{wheel.name}"\n'
    text += f'sha256 = "{hashlib.sha256(data).hexdigest()}"\nsize = {len(data)}\n'
    (folder / "Plugin.toml").write_text(text)
    return folder


# --- wheels ---------------------------------------------------------------------------------------


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


# --- released folders -----------------------------------------------------------------------------


def test_a_released_folder_is_verified(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = tmp_path / "release"
    a_release(folder, write_toy_wheel(folder))
    installed = install(request_for(folder, require_verified=True))
    assert installed.receipt.trust == "verified"
    assert installed.warnings == ()


def test_verified_says_that_it_speaks_of_the_plugin_s_own_archive_alone(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    folder = tmp_path / "release"
    write_api_wheel(folder)
    wheel = write_toy_wheel(folder, requires=("vox-plugin-api==0.1.0",))
    receipt = install(request_for(a_release(folder, wheel), require_verified=True)).receipt
    assert describe_trust(receipt) == (
        f"{wheel.name} matched its released checksum; none vouches for its dependency, recorded as installed"
    )
    alone = receipt.model_copy(update={"distributions": receipt.distributions[1:]})
    assert describe_trust(alone) == f"{wheel.name} matched its released checksum"
    two = receipt.model_copy(
        update={"trust": "development", "distributions": receipt.distributions + alone.distributions}
    )
    assert describe_trust(two) == (
        f"no checksum vouches for {wheel.name}; none vouches for its 2 dependencies, recorded as installed"
    )


def test_the_manifest_file_itself_may_be_named(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = a_release(tmp_path, write_toy_wheel(tmp_path))
    assert install(request_for(folder / "Plugin.toml")).receipt.trust == "verified"


def test_artifacts_of_other_platforms_may_be_absent_or_wrong(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    folder = a_release(tmp_path, write_toy_wheel(tmp_path))
    with (folder / "Plugin.toml").open("a") as file:
        file.write(f'[artifacts.macos-aarch64]\nfile = "gone.whl"\nsha256 = "{"0" * 64}"\nsize = 1\n')
    assert install(request_for(folder)).receipt.trust == "verified"


def test_a_platform_that_is_not_declared_has_an_error_of_its_own(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    folder = a_release(tmp_path, write_toy_wheel(tmp_path), platform="macos-aarch64")
    with pytest.raises(PluginError) as caught:
        install(request_for(folder))
    assert caught.value.code == "no-artifact"
    assert (
        "plugin 'vox-toy' declares no artifact for 'linux-x86_64'; has: macos-aarch64" in caught.value.message
    )


@pytest.mark.parametrize("change", ["a byte", "the size"])
def test_an_artifact_that_is_not_the_released_one_is_refused(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path, change: str
) -> None:
    wheel = write_toy_wheel(tmp_path / "release")
    folder = a_release(wheel.parent, wheel)
    expected = hashlib.sha256(wheel.read_bytes()).hexdigest()
    data = wheel.read_bytes()
    wheel.write_bytes(bytes([data[0] ^ 1]) + data[1:] if change == "a byte" else data + b"\0")
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    with pytest.raises(IntegrityError) as caught:
        install(request_for(folder))
    facts = dict(caught.value.facts)
    assert caught.value.code == "artifact-mismatch"
    assert "linux-x86_64" in caught.value.message
    assert expected in facts["expected"]
    assert found in facts["found"]
    assert hidden(plugins_dir) == []


def test_a_released_manifest_must_be_the_wheel_s_plus_artifacts(
    tmp_path: Path, request_for: MakeRequest
) -> None:
    wheel = write_toy_wheel(tmp_path)
    folder = a_release(tmp_path, wheel, manifest=manifest_text(lane="cuda"))
    with pytest.raises(PluginError) as caught:
        install(request_for(folder))
    assert caught.value.code == "manifest-differs"
    assert [name for name, _ in caught.value.facts] == ["backend.lane"]


def test_a_link_out_of_the_release_is_refused(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = tmp_path / "release"
    wheel = write_toy_wheel(folder)
    a_release(folder, wheel)
    outside = wheel.rename(tmp_path / wheel.name)
    wheel.symlink_to(outside)
    with pytest.raises(PluginError) as caught:
        install(request_for(folder))
    assert caught.value.code == "artifact-outside"


def test_a_foreign_system_is_refused_in_one_sentence(tmp_path: Path, request_for: MakeRequest) -> None:
    wheel = write_toy_wheel(tmp_path)
    with pytest.raises(PluginError) as caught:
        install(request_for(wheel, os="windows"))
    assert caught.value.code == "platform-unsupported"
    assert "needs linux or macos; this is windows" in caught.value.message


# --- other paths ----------------------------------------------------------------------------------


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


PROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
[project]
name = "vox-toy"
version = "1.0.0"
dependencies = ["vox-plugin-api==0.1.0"]
"""
BACKEND = """
import shutil
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    shutil.copy("made/{wheel}", wheel_directory)
    return "{wheel}"
"""


def a_project(folder: Path, name: str, wheel: Path) -> None:
    """Write a source folder whose build backend hands out a ready wheel: no network, no time."""
    (folder / "made").mkdir(parents=True)
    wheel.rename(folder / "made" / wheel.name)
    (folder / "backend.py").write_text(BACKEND.format(wheel=wheel.name))
    text = PROJECT.replace('"vox-toy"', f'"{name}"')
    if name == "vox-plugin-api":
        text = text.replace('version = "1.0.0"', 'version = "0.1.0"')
        text = text.replace('"vox-plugin-api==0.1.0"', "")
    (folder / "pyproject.toml").write_text(text)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A clone with a plugin and the distribution it needs beside it, as in this repository."""
    root = tmp_path / "clone"
    a_project(root / "plugin-api", "vox-plugin-api", write_api_wheel(tmp_path / "made"))
    toy = root / "plugins" / "vox-toy"
    a_project(toy, "vox-toy", write_toy_wheel(tmp_path / "made", requires=("vox-plugin-api==0.1.0",)))
    (toy / "src" / "vox_toy").mkdir(parents=True)
    (toy / "src" / "vox_toy" / "Plugin.toml").write_text(manifest_text())
    return root


def test_a_source_folder_is_built_with_the_distributions_beside_it(
    clone: Path, request_for: MakeRequest, plugins_dir: Path, tools: Tools
) -> None:
    lines: list[str] = []
    quiet = make_tools("uv" if tools.uv else "pip", report=lines.append)
    installed = install(request_for(clone / "plugins" / "vox-toy", tools=quiet))
    assert installed.receipt.trust == "development"
    assert discover_installed(plugins_dir)[0].problem is None
    assert any(str(clone / "plugin-api") in line for line in lines)


def test_installing_the_same_sources_again_does_nothing(
    clone: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    path = clone / "plugins" / "vox-toy"
    first = install(request_for(path))
    again = install(request_for(path))
    assert again.was_unchanged
    assert again.receipt == first.receipt
    assert not install(request_for(path, force=True)).was_unchanged


def test_changed_sources_or_changed_files_are_installed_again(
    clone: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    path = clone / "plugins" / "vox-toy"
    first = install(request_for(path)).receipt
    (plugins_dir / first.environment / first.packages / "evil.pth").write_text("")
    second = install(request_for(path))
    assert not second.was_unchanged
    verify_installation(second.receipt, plugins_dir)
    (clone / "plugin-api" / "new.py").write_text("")
    assert not install(request_for(path)).was_unchanged


def test_a_foreign_plugin_is_refused_before_it_is_built(
    clone: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    path = clone / "plugins" / "vox-toy"
    (path / "src" / "vox_toy" / "Plugin.toml").write_text(manifest_text(protocol=">=99,<100"))
    (path / "backend.py").write_text("raise SystemExit('built')")
    with pytest.raises(PluginError) as caught:
        install(request_for(path))
    assert caught.value.code == "protocol-unsupported"


def test_a_build_that_fails_shows_the_builder_s_words(clone: Path, request_for: MakeRequest) -> None:
    path = clone / "plugins" / "vox-toy"
    (path / "backend.py").write_text(
        "def build_wheel(*a): raise OSError('No CMAKE_CXX_COMPILER could be found')"
    )
    with pytest.raises(PluginError) as caught:
        install(request_for(path))
    assert caught.value.code == "no-compiler"
    assert "CMAKE_CXX_COMPILER" in dict(caught.value.facts)["output"]


def test_a_sibling_of_another_version_is_not_taken(clone: Path) -> None:
    toy = clone / "plugins" / "vox-toy"
    assert find_sibling_sources(toy) == [clone / "plugin-api"]
    project = clone / "plugin-api" / "pyproject.toml"
    project.write_text(project.read_text().replace("0.1.0", "0.2.0"))
    assert find_sibling_sources(toy) == []


def test_build_results_do_not_count_as_sources(clone: Path) -> None:
    before = digest_of_sources([clone])
    for name in ("build/x.o", "src/x.egg-info/PKG-INFO", "__pycache__/x.pyc", ".git/HEAD", "lib.so"):
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text("x")
    assert digest_of_sources([clone]) == before
    (clone / "kernel.cpp").write_text("x")
    assert digest_of_sources([clone]) != before


# --- atomicity ------------------------------------------------------------------------------------

STEPS = ["creating its environment", "installing it", "compiling its modules", "recording what"]

KILLS_ITSELF = """
import os, signal, sys
from pathlib import Path
from plugin_toys import make_tools
from vox_host.installation import InstallRequest, install

wheel, plugins_dir, step = sys.argv[1:]

def report(line):
    if step in line:
        os.kill(os.getpid(), signal.SIGKILL)

install(
    InstallRequest(
        path=Path(wheel), plugins_dir=Path(plugins_dir), os="linux", arch="x86_64",
        tools=make_tools(report=report), host_version="0.1.0",
    )
)
"""


def environment_of(plugins_dir: Path) -> dict[str, str]:
    return {
        **os.environ,
        "VOX_HOME": str(plugins_dir.parent),
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }


def install_and_die_at(step: str, wheel: Path, plugins_dir: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", KILLS_ITSELF, wheel, plugins_dir, step],
        env=environment_of(plugins_dir),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def start_install(path: Path, plugins_dir: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "vox_host", "plugin", "install", "--no-index", "--path", str(path)],
        env=environment_of(plugins_dir),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_kill_leaves_nothing_visible_and_the_next_installation_cleans_up(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path, step: str
) -> None:
    wheel = write_toy_wheel(tmp_path / "wheels")
    install_and_die_at(step, wheel, plugins_dir)
    assert visible(plugins_dir) == []
    assert discover_installed(plugins_dir) == []
    left = hidden(plugins_dir)
    assert left
    receipt = install(request_for(wheel)).receipt
    assert not set(left) & set(hidden(plugins_dir))
    verify_installation(receipt, plugins_dir, full=True)


def test_a_kill_in_the_middle_of_a_build_leaves_nothing_visible(clone: Path, plugins_dir: Path) -> None:
    marker = clone / "building"
    (clone / "plugin-api" / "backend.py").write_text(
        f"import pathlib, time\ndef build_wheel(*a):\n"
        f" pathlib.Path({str(marker)!r}).write_text('')\n time.sleep(100)\n"
    )
    process = start_install(clone / "plugins" / "vox-toy", plugins_dir)
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert visible(plugins_dir) == []
    assert hidden(plugins_dir)


def test_a_kill_while_replacing_leaves_the_old_plugin_intact(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    old = install(request_for(write_toy_wheel(tmp_path / "old"))).receipt
    new = write_toy_wheel(tmp_path / "new", version="2.0.0")
    install_and_die_at("recording what", new, plugins_dir)
    assert discover_installed(plugins_dir)[0].version == "1.0.0"
    verify_installation(old, plugins_dir, full=True)


def test_installed_files_share_nothing_with_the_installer_s_cache(
    installed_toy: Installed, plugins_dir: Path
) -> None:
    tree = plugins_dir / installed_toy.receipt.environment
    shared = [path for path in tree.rglob("*") if path.is_file() and path.lstat().st_nlink > 1]
    assert shared == []


def test_a_failure_leaves_no_environment_behind(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    wheel = write_toy_wheel(tmp_path / "wheels", requires=("vox-no-such-distribution==3",))
    with pytest.raises(PluginError):
        install(request_for(wheel))
    assert (visible(plugins_dir), hidden(plugins_dir)) == ([], [])


def test_two_installations_at_once_take_turns(tmp_path: Path, plugins_dir: Path) -> None:
    wheels = [write_toy_wheel(tmp_path / name, name) for name in ("vox-a", "vox-b")]
    running = [start_install(wheel, plugins_dir) for wheel in wheels]
    for process in running:
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
    assert visible(plugins_dir) == ["vox-a.json", "vox-b.json"]
    for candidate in discover_installed(plugins_dir):
        assert candidate.receipt is not None
        verify_installation(candidate.receipt, plugins_dir, full=True)


def test_a_folder_that_can_t_be_written_is_a_clear_error(tmp_path: Path, request_for: MakeRequest) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError) as caught:
        install(request_for(write_toy_wheel(tmp_path), plugins_dir=file / "plugins"))
    assert caught.value.code == "not-writable"


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    # A limit on the size of files stands for the full disk: the kernel refuses the write itself.
    wheel = write_toy_wheel(tmp_path / "wheels", files={"vox_toy/big.txt": "x" * 200_000})
    program = textwrap.dedent(
        """
        import errno, resource, signal, sys
        from vox_host.cli import run
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        sys.exit(run(sys.argv[1:]))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plugin", "install", "--no-index", "--path", str(wheel)],
        env=environment_of(plugins_dir),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "error[disk-full]" in done.stderr
    assert (visible(plugins_dir), hidden(plugins_dir)) == ([], [])


# --- removal --------------------------------------------------------------------------------------


def test_a_removed_plugin_leaves_nothing(installed_toy: Installed, plugins_dir: Path) -> None:
    remove(plugins_dir, "vox-toy")
    assert (visible(plugins_dir), hidden(plugins_dir)) == ([], [])


def test_a_plugin_with_a_damaged_receipt_can_be_removed(installed_toy: Installed, plugins_dir: Path) -> None:
    (plugins_dir / "vox-toy.json").write_text("{")
    remove(plugins_dir, "vox-toy")
    assert (visible(plugins_dir), hidden(plugins_dir)) == ([], [])


def test_a_damaged_receipt_s_environment_is_not_cleaned_by_another_installation(
    installed_toy: Installed, plugins_dir: Path, tmp_path: Path, request_for: MakeRequest
) -> None:
    path = plugins_dir / "vox-toy.json"
    good = path.read_text()
    path.write_text("{")
    install(request_for(write_toy_wheel(tmp_path / "other", "vox-other")))
    path.write_text(good)
    verify_installation(installed_toy.receipt, plugins_dir, full=True)


@pytest.mark.parametrize("plugin_id", ["vox-nope", "../outside", ".lock", "/etc/passwd"])
def test_only_what_is_in_the_plugin_folder_can_be_removed(
    installed_toy: Installed, plugins_dir: Path, plugin_id: str
) -> None:
    outside = plugins_dir.parent / "outside.json"
    outside.write_text(json.dumps({}))
    with pytest.raises(UsageError) as caught:
        remove(plugins_dir, plugin_id)
    assert dict(caught.value.facts)["installed"] == "vox-toy"
    assert outside.exists()


def test_a_plain_native_library_is_stored_verified_and_says_that_nothing_starts_it(
    tmp_path: Path, request_for: MakeRequest, plugins_dir: Path
) -> None:
    library = tmp_path / "libtoy.so"
    library.write_bytes(b"\x7fELF")
    installed = install(request_for(a_release(tmp_path, library)))
    assert installed.receipt.trust == "verified"
    tree = plugins_dir / installed.receipt.environment
    assert (tree / "libtoy.so").read_bytes() == b"\x7fELF"
    candidate = discover_installed(plugins_dir)[0]
    assert candidate.problem is not None
    assert (candidate.problem.stage, candidate.problem.code) == ("start", "no-worker")


def test_a_dependency_comes_from_the_folder_of_the_wheel(tmp_path: Path, request_for: MakeRequest) -> None:
    folder = tmp_path / "wheels"
    write_wheel(folder, "vox-beside", "1.0", {"vox_beside.py": ""})
    installed = install(request_for(write_toy_wheel(folder, requires=("vox-beside==1.0",))))
    assert installed.receipt.plugin == "vox-toy"
