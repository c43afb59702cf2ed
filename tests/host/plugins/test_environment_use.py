"""An environment that a running host uses outlives the installations that replace it."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.installed_lane import CPU_LANE, install_lane
from vox_host.environment_use import alone_with, lock_path
from vox_host.errors import IntegrityError, PluginError
from vox_host.installation.store import ENVIRONMENTS, locked, remove, remove_remains
from vox_host.integrity import verify_installation
from vox_host.receipt import load_receipt

HOLDER = """
import sys
from collections.abc import Iterator
from pathlib import Path
from vox_host.environment_use import hold_environment
hold_environment(Path(sys.argv[1]), sys.argv[2])
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def environment(tmp_path: Path) -> str:
    name = f"{ENVIRONMENTS}/lane-0001"
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "module.py").write_text("")
    return name


@contextlib.contextmanager
def holding(plugins: Path, environment: str) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds an environment."""
    command = [sys.executable, "-c", HOLDER, str(plugins), environment]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


@pytest.fixture
def holder(tmp_path: Path, environment: str) -> Iterator[subprocess.Popen[str]]:
    with holding(tmp_path, environment) as process:
        yield process


def test_it_is_kept_while_it_is_held_and_removed_after(tmp_path, environment, holder):
    said: list[str] = []
    remove_remains(tmp_path, said.append)
    with locked(tmp_path, said.append):
        pass
    assert (tmp_path / environment / "module.py").is_file()
    assert said == ["keeping lane-0001: a running vox-host uses it"] * 2
    # Even after a kill nothing is left locked.
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    remove_remains(tmp_path, said.append)
    assert not (tmp_path / environment).exists()
    assert not lock_path(tmp_path, environment).exists()
    assert said[-1] == "removing lane-0001: no plugin uses it"


def test_two_may_hold_it_and_nobody_alone(tmp_path, environment, holder):
    with alone_with(tmp_path, environment) as is_free:
        assert not is_free


def test_removing_a_plugin_leaves_what_runs(tmp_path):
    lane = install_lane(
        tmp_path / "home",
        "vox-lane",
        CPU_LANE.format(wrapped="None", plugin_id="vox-lane", numerics='"fast"'),
    )
    plugins = lane.home / "plugins"
    receipt = load_receipt(plugins / "vox-lane.json")
    with holding(plugins, receipt.environment):
        remove(plugins, "vox-lane")
        assert (plugins / receipt.environment).is_dir()


def test_a_tree_that_goes_while_it_is_read_is_a_mismatch(tmp_path, monkeypatch):
    lane = install_lane(
        tmp_path / "home",
        "vox-lane",
        CPU_LANE.format(wrapped="None", plugin_id="vox-lane", numerics='"fast"'),
    )
    receipt = load_receipt(lane.home / "plugins/vox-lane.json")
    from vox_host import integrity

    def vanishing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No such file or directory", "/gone/module.py")

    monkeypatch.setattr(integrity, "read_entries", vanishing)
    with pytest.raises(IntegrityError, match=r"vox-lane") as caught:
        verify_installation(receipt, lane.home / "plugins")
    assert "/gone/module.py" in str(caught.value.facts)


async def test_a_check_of_a_replaced_plugin_is_given_up_with_a_sentence(tmp_path, request):
    from lanes.every_lane import make_lane
    from vox_host.conformance.session import Target
    from vox_host.conformance.suite import check
    from vox_host.discovery import discover
    from vox_host.settings import load_settings

    make_lane("mens-cpu-ref", request.config)
    code = CPU_LANE.format(wrapped="CpuOps(library.kernels)", plugin_id="vox-lane", numerics='"canonical"')
    lane = install_lane(tmp_path / "home", "vox-lane", code)
    settings = load_settings({"VOX_HOME": str(lane.home)})
    plugins = settings.plugins_dir
    receipt = load_receipt(plugins / "vox-lane.json")
    newer = f"{ENVIRONMENTS}/vox-lane-newer"

    def replace_it(line: str) -> None:
        if not (plugins / newer).exists():
            shutil.copytree(plugins / receipt.environment, plugins / newer, symlinks=True)
            text = (plugins / "vox-lane.json").read_text().replace(receipt.environment, newer)
            (plugins / "vox-lane.json").write_text(text)

    target = Target(settings=settings, candidate=discover(plugins)[0])
    with pytest.raises(PluginError, match="was replaced or removed while it was checked") as caught:
        await check(target, only=["integrity"], say=replace_it)
    assert caught.value.code == "plugin-replaced"
