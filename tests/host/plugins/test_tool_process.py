"""Interrupted and killed installers: they end with all that they have started."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from plugin_toys import write_toy_wheel

from fixtures.processes import still_alive
from vox_host.tool_process import tool_process

COMMAND = """
import pathlib, sys
import vox_host.cli as cli
from vox_host.installation.tools import run_tool
from vox_host.installation.store import staging
home = pathlib.Path(sys.argv[1])
program = '''
import pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
time.sleep(0.2)
pathlib.Path(sys.argv[1], "started").write_text(str(child.pid))
time.sleep(60)
'''
class App:
    def __call__(self, *_, **__):
        with staging(home):
            run_tool([sys.executable, "-c", program, home], "x", environment={}, report=print)
cli._build = lambda _: App()
sys.argv = ["vox-host", "plugin"]
cli.main()
"""


def wait_until(holds: Callable[[], object], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_tool_ends_with_its_children_and_the_staging_folder_goes(tmp_path, number, status):
    process = subprocess.Popen([sys.executable, "-c", COMMAND, tmp_path], env=os.environ)
    started = tmp_path / "started"
    wait_until(lambda: started.exists() and started.read_text(), process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 2
    process.send_signal(number)
    assert process.wait(20) == status
    assert still_alive(family, within_s=0.5) == []
    assert [path.name for path in tmp_path.iterdir() if "staging" in path.name] == []


DIES_BEFORE_IT_IS_WATCHED = """
import os, signal, subprocess, sys
from vox_host.tool_process import tool_process
from vox_host.watchdog import Watchdog
Watchdog.watch = lambda self, group: os.kill(os.getpid(), signal.SIGKILL)
with tool_process(["/bin/sh", "-c", "touch " + sys.argv[1]], {}, stderr=subprocess.STDOUT) as process:
    process.wait()
"""


def test_a_tool_that_no_watchdog_knows_never_begins(tmp_path):
    done = subprocess.run([sys.executable, "-c", DIES_BEFORE_IT_IS_WATCHED, tmp_path / "begun"], check=False)
    assert done.returncode == -signal.SIGKILL
    time.sleep(0.5)
    assert list(tmp_path.iterdir()) == []


def test_a_tool_that_ends_well_is_not_killed_and_leaves_no_watchdog(tmp_path):
    with tool_process(["/bin/sh", "-c", "cat; echo done"], {}, stderr=subprocess.STDOUT) as process:
        output, _ = process.communicate(timeout=20)
    assert (output, process.returncode) == (b"done\n", 0)
    assert psutil.Process().children(recursive=True) == []


# --- an installation, killed ----------------------------------------------------------------------

# Stands before the real uv. At the named step it starts a child, and both go on making the folder
# of the environment anew, as an installer that outlived its host would.
SLOW_UV = """#!/bin/sh
for word in "$@"; do last="$word"; done
if [ "$1" = STEP ]; then
    (while :; do mkdir -p "ENVIRONMENTS/vox-toy-stray"; sleep 0.02; done) &
    while :; do mkdir -p "ENVIRONMENTS/vox-toy-stray"; touch MARKER; sleep 0.02; done
fi
exec REAL "$@"
"""


@pytest.fixture
def vox(plugins_dir: Path) -> Callable[..., subprocess.Popen[bytes]]:
    def start(*arguments: object, path: str = os.environ["PATH"]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "PATH": path,
            "VOX_HOME": str(plugins_dir.parent),
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        command = [sys.executable, "-m", "vox_host", *map(str, arguments)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    return start


@pytest.mark.parametrize("step", ["venv", "pip"])
@pytest.mark.parametrize("then", ["list", "install"])
def test_a_killed_installation_takes_its_tools_along_and_the_next_command_cleans_up(
    tmp_path: Path, plugins_dir: Path, vox, step: str, then: str
) -> None:
    real = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if real is None:
        pytest.skip("uv is not here")
    marker, slow = tmp_path / "marker", tmp_path / "bin" / "uv"
    slow.parent.mkdir()
    script = SLOW_UV.replace("STEP", step).replace("MARKER", str(marker)).replace("REAL", real)
    slow.write_text(script.replace("ENVIRONMENTS", str(plugins_dir / ".environments")))
    slow.chmod(0o755)
    install = ("plugin", "install", "--no-index", "--path", write_toy_wheel(tmp_path / "wheels"))

    process = vox(*install, path=f"{slow.parent}:{os.environ['PATH']}")
    wait_until(marker.exists, process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert len(family) >= 3  # the watchdog, uv, what uv has started
    process.kill()
    process.communicate()
    survivors = still_alive(family, within_s=2.0)
    for survivor in survivors:  # a test that fails leaves nothing running either
        survivor.kill()
    assert survivors == []
    left = {path.name for path in plugins_dir.glob(".environments/*")}
    assert "vox-toy-stray" in left
    assert list(plugins_dir.glob("*.json")) == []

    following = vox(*(install if then == "install" else ("plugin", "list")))
    _, told = following.communicate(timeout=60)
    assert following.returncode == 0, told
    assert b"removing vox-toy-stray: no plugin uses it" in told
    time.sleep(0.2)
    assert not left & {path.name for path in plugins_dir.glob(".environments/*")}
    assert list(plugins_dir.glob(".staging-*")) == []
    assert len(list(plugins_dir.glob("*.json"))) == (then == "install")


def test_a_list_beside_an_installation_at_work_removes_nothing(
    tmp_path: Path, plugins_dir: Path, vox
) -> None:
    from vox_host.installation import remove_remains
    from vox_host.installation.store import locked, staging

    with locked(plugins_dir, print), staging(plugins_dir) as folder:
        remove_remains(plugins_dir, print)
        assert folder.is_dir()
        listing = vox("plugin", "list")
        listing.communicate(timeout=60)
        assert listing.returncode == 0
        assert folder.is_dir()


def test_remains_that_can_t_be_removed_fail_no_command(plugins_dir: Path, monkeypatch) -> None:
    from vox_host.installation import remove_remains, store

    plugins_dir.mkdir(parents=True)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(store, "FileLock", refuse)
    remove_remains(plugins_dir, print)
