"""A plugin is there whole or not at all, whatever ends an installation, and gone when it is removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from plugin_toys import hidden, visible, write_toy_wheel

from vox_host.discovery import discover_installed
from vox_host.errors import PluginError, UsageError
from vox_host.installation import Installed, InstallRequest, install, remove
from vox_host.integrity import verify_installation

MakeRequest = Callable[..., InstallRequest]

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
    with pytest.raises(PluginError) as caught:
        remove(plugins_dir, plugin_id)
    assert caught.value.code == "plugin-not-installed"
    assert dict(caught.value.facts)["installed"] == "vox-toy"
    assert outside.exists()
