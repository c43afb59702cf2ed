"""The host is a process of its own here, and is killed as the system would kill it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from fixtures.scripted_plugin import scripted_worker_env

HOST = """
import asyncio, json, sys
from pathlib import Path
from vox_host.workers import LaunchPlan, Supervisor
from vox_plugin_api import messages as m

async def main():
    plan = json.loads(sys.argv[1])
    plan["python"], plan["log_dir"] = Path(plan["python"]), Path(plan["log_dir"])
    async def prepare(worker):
        await worker.call("load_model", m.LoadModelParams(model_dir="/nowhere", model_digest="cd" * 32))
    supervisor = Supervisor(LaunchPlan(**plan), prepare=prepare)
    await supervisor.start()
    print(supervisor.state.pid, flush=True)
    async for event in supervisor.stream("generate", m.GenerateParams(token_ids=[1], max_tokens=9)):
        print("token", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def living(pids: set[int]) -> set[int]:
    alive = set()
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                alive.add(pid)
        except psutil.NoSuchProcess:
            continue
    return alive


@pytest.mark.parametrize(
    ("script", "how"),
    [
        pytest.param({}, signal.SIGKILL, id="idle"),
        pytest.param({}, signal.SIGSEGV, id="idle, and the host crashes"),
        pytest.param({"at_token": {"1": "hang"}}, signal.SIGKILL, id="asleep"),
        pytest.param({"at_token": {"1": "gil"}}, signal.SIGKILL, id="in a native call that holds the GIL"),
        pytest.param(
            {"at_token": {"0": "start-child", "1": "gil"}}, signal.SIGKILL, id="with a child of its own"
        ),
    ],
)
def test_when_the_host_dies_no_process_is_left(tmp_path: Path, script: dict, how: signal.Signals) -> None:
    # The worker, its watchdog, and what the worker has started.
    assert_none_is_left(tmp_path, script, how, family_size=3 if "0" in script.get("at_token", {}) else 2)


def assert_none_is_left(
    tmp_path: Path, script: dict, how: signal.Signals, *, family_size: int, host_code: str = HOST
) -> None:
    plan = scripted_worker_env(tmp_path, script)
    described = {name: str(getattr(plan, name)) for name in
                 ("plugin_id", "plugin_version", "python", "manifest_digest", "log_dir")}  # fmt: skip
    described["extra_environment"] = dict(plan.extra_environment)
    host = subprocess.Popen(
        [sys.executable, "-c", host_code, json.dumps(described)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        worker = int(host.stdout.readline())
        assert host.stdout.readline() == "token\n"
        time.sleep(0.3)
        family = {child.pid for child in psutil.Process(host.pid).children(recursive=True)}
        assert worker in family
        assert len(family) == family_size
        os.kill(host.pid, how)
        host.wait()
        deadline = time.monotonic() + 2.0
        while (left := living(family)) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not left, f"{len(left)} of {len(family)} processes live 2 s after their host"
    finally:
        host.kill()
        host.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_without_a_shell_for_the_watchdog_the_parent_death_signal_does_it(tmp_path: Path) -> None:
    no_shell = "from vox_host import watchdog; watchdog.SHELL = Path('/absent')"
    host = HOST.replace("\nasync def main", f"\n{no_shell}\nasync def main")
    assert_none_is_left(tmp_path, {"at_token": {"1": "gil"}}, signal.SIGKILL, family_size=1, host_code=host)


def test_without_the_parent_death_signal_the_watchdog_alone_does_it(tmp_path: Path) -> None:
    """What happens where the kernel has no such signal; a Linux worker can give it back."""
    script = {"at_start": "no-death-signal", "at_token": {"1": "gil"}}
    assert_none_is_left(tmp_path, script, signal.SIGKILL, family_size=2)
