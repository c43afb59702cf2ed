import asyncio
import os
import signal
import stat
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from fixtures.scripted_plugin import scripted_worker_env
from vox_host.workers import LaunchPlan, Limits
from vox_host.workers.process import Exit, WorkerProcess

QUICK = Limits(shutdown_grace_s=0.3, terminate_grace_s=0.3)


def interpreter(tmp_path: Path, script: str) -> LaunchPlan:
    """A plan whose interpreter is a shell script."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return LaunchPlan(
        plugin_id="vox-shell",
        plugin_version="1",
        python=python,
        manifest_digest="00" * 32,
        log_dir=tmp_path / "log",
    )


def group_members(leader: int) -> list[psutil.Process]:
    """Living processes of the session that `leader` led."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return members


@pytest.mark.parametrize(
    ("script", "status", "signal_number", "text"),
    [
        ("exit 0", 0, None, "status 0 after"),
        ("exit 7", 7, None, "status 7 after"),
        ("kill -9 $$", None, 9, "signal 9 (SIGKILL) after"),
        ("kill -11 $$", None, 11, "signal 11 (SIGSEGV) after"),
    ],
)
async def test_an_end_is_told_with_its_status_or_its_signals_name(
    tmp_path: Path, script: str, status: int | None, signal_number: int | None, text: str
) -> None:
    process = WorkerProcess.start(interpreter(tmp_path, script))
    exit_ = await process.exited
    process.connection.close()
    assert (exit_.status, exit_.signal_number) == (status, signal_number)
    assert str(exit_).startswith(text)


def test_a_signal_without_a_name_is_still_told() -> None:
    assert str(Exit(status=None, signal_number=250, after_s=1.25)) == "signal 250 (unnamed) after 1.2 s"


async def test_what_was_written_last_is_kept_and_no_more_than_8_kib_is_shown(tmp_path: Path) -> None:
    process = WorkerProcess.start(
        interpreter(tmp_path, "echo first; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); echo line $i >&2; done")
    )
    await process.exited
    process.connection.close()
    assert process.log.tail().endswith("line 1999\nline 2000\n")
    assert len(process.log.tail()) == 8192
    assert process.log.path.read_text().startswith("first\n")


async def test_each_process_has_a_log_of_its_own_and_old_ones_go(tmp_path: Path) -> None:
    plan = interpreter(tmp_path, "exit 0")
    plan.log_dir.mkdir()
    for number in range(40):
        (plan.log_dir / f"vox-shell-20200101-0000{number:02}-1-0.log").touch()
    (plan.log_dir / "vox-shell-metal-20200101-000000-1-0.log").touch()
    paths = set()
    for _ in range(3):
        process = WorkerProcess.start(plan)
        await process.exited
        process.connection.close()
        paths.add(process.log.path)
    assert len(paths) == 3
    assert all(path.exists() for path in paths)
    assert len(list(plan.log_dir.glob("vox-shell-2*"))) == 20
    assert (plan.log_dir / "vox-shell-metal-20200101-000000-1-0.log").exists()


async def test_without_a_log_file_it_runs_and_writes_to_the_host_s_stderr(tmp_path: Path, capfd) -> None:
    plan = interpreter(tmp_path, "pwd; echo said >&2; exit 0")
    plan.log_dir.write_text("not a folder")
    process = WorkerProcess.start(plan)
    exit_ = await process.exited
    process.connection.close()
    assert exit_.status == 0
    assert process.log.path is None
    assert str(plan.log_dir) in process.log.problem
    assert process.log.tail() == ""
    assert capfd.readouterr() == ("", "/\nsaid\n")


async def test_a_process_that_does_not_listen_is_terminated_then_killed(tmp_path: Path) -> None:
    for script, expected in (
        ("exec sleep 60", signal.SIGTERM),
        ("trap '' TERM; while true; do sleep 60; done", signal.SIGKILL),
    ):
        process = WorkerProcess.start(interpreter(tmp_path, script))
        await asyncio.sleep(0.1)
        await process.end(QUICK)
        exit_ = await process.exited
        process.connection.close()
        assert exit_.signal_number == expected, script


async def test_all_that_a_worker_has_started_ends_with_it(tmp_path: Path) -> None:
    process = WorkerProcess.start(interpreter(tmp_path, "sleep 60 & sleep 60 & exit 0"))
    await process.exited
    process.connection.close()
    deadline = time.monotonic() + 2
    while (left := group_members(process.pid)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    assert left == []


async def test_a_process_that_cannot_start_leaves_nothing_open(tmp_path: Path) -> None:
    plan = replace(interpreter(tmp_path, ""), python=tmp_path / "absent")
    before = set(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            WorkerProcess.start(plan)
    assert set(os.listdir("/dev/fd")) == before
    assert psutil.Process().children() == []


async def test_a_worker_has_the_standard_descriptors_and_its_own_and_no_other(tmp_path: Path) -> None:
    secret = (tmp_path / "secret").open("w")
    os.set_inheritable(secret.fileno(), True)
    process = WorkerProcess.start(
        interpreter(
            tmp_path,
            'for fd in /dev/fd/*; do [ -e "$fd" ] && echo "${fd##*/}"; done; echo "own $VOX_PLUGIN_FD"',
        )
    )
    await process.exited
    process.connection.close()
    secret.close()
    lines = process.log.tail().split()
    own = lines[lines.index("own") + 1]
    # The shell holds its own script as one more (10 in dash, 255 in bash).
    assert set(lines[: lines.index("own")]) - {"10", "255"} == {"0", "1", "2", own}


async def test_no_secret_of_the_host_is_in_the_workers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VOX_API_KEY", "a-secret-value")
    monkeypatch.setenv("LC_TIME", "C.UTF-8")
    process = WorkerProcess.start(scripted_worker_env(tmp_path, {"at_start": "hang"}))
    while not (environment := psutil.Process(process.pid).environ()):
        await asyncio.sleep(0.005)  # it is empty for a moment while the program is replaced
    process.kill()
    await process.exited
    process.connection.close()
    assert "a-secret-value" not in environment.values()
    assert environment["LC_TIME"] == "C.UTF-8"
    assert {name for name in environment if name.startswith("VOX")} == {"VOX_PLUGIN_FD", "VOX_SCRIPTED"}
