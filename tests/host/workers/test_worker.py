import asyncio
import os
import signal
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.scripted_plugin import scripted_worker_env
from vox_host.errors import IntegrityError, PluginError, VoxError, WorkerFailedError
from vox_host.workers import Limits, Worker
from vox_plugin_api import messages as m

LIMITS = Limits(
    handshake_timeout_s=20.0,
    heartbeat_timeout_s=10.0,
    connection_timeout_s=1.0,
    shutdown_grace_s=0.5,
    terminate_grace_s=0.5,
)
MODEL = m.LoadModelParams(model_dir="/nowhere", model_digest="cd" * 32)


def prompt(first: int, max_tokens: int = 5) -> m.GenerateParams:
    return m.GenerateParams(
        token_ids=[first], max_tokens=max_tokens, sampling=m.SamplingParams(temperature=0.0)
    )


async def start(tmp_path: Path, limits: Limits = LIMITS, **script: Any) -> Worker:
    worker = await Worker.start(scripted_worker_env(tmp_path, script), limits)
    await worker.call("load_model", MODEL)
    return worker


async def tokens(worker: Worker, params: m.GenerateParams) -> list[int]:
    found: list[int] = []
    async with aclosing(worker.stream("generate", params)) as events:
        async for event in events:
            found += [token["token_id"] for token in event.result["tokens"]]
    return found


async def failure_of(worker: Worker) -> WorkerFailedError:
    with pytest.raises(WorkerFailedError) as caught:
        await tokens(worker, prompt(0))
    # The process ends with the error, not only when somebody stops the worker.
    deadline = time.monotonic() + 1.0
    while psutil.pid_exists(worker.pid) and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert not psutil.pid_exists(worker.pid)
    await worker.stop()
    return caught.value


async def test_a_worker_serves_requests_together_and_stops(tmp_path: Path) -> None:
    worker = await start(tmp_path, token_s=0.005)
    answers = await asyncio.gather(*(tokens(worker, prompt(100 * n, 20)) for n in range(4)))
    assert answers == [list(range(100 * n + 1, 100 * n + 21)) for n in range(4)]
    pid = worker.pid
    await worker.stop()
    assert not psutil.pid_exists(pid)


@pytest.mark.parametrize(
    ("action", "exit_"),
    [
        ("crash", "signal 9 (SIGKILL)"),
        ("segfault", "signal 11 (SIGSEGV)"),
        ("exit", "status 0"),
        ("sys-exit", "status 7"),
    ],
)
async def test_a_worker_that_dies_in_an_answer_is_an_error_with_its_evidence_at_once(
    tmp_path: Path, action: str, exit_: str
) -> None:
    worker = await start(tmp_path, at_load="print", at_token={"2": action})
    began = time.monotonic()
    error = await failure_of(worker)
    assert time.monotonic() - began < 2.0
    facts = dict(error.facts)
    assert error.code == "worker-died"
    assert facts["exit"].startswith(exit_)
    assert "GiB free of" in facts["memory"]
    assert any("noise from C" in line or "actions.py" in line for line in facts["last lines"])
    assert "noise from Python" in Path(facts["log"]).read_text()
    assert ("where memory is short" in (error.remedy or "")) == (action == "crash")


@pytest.mark.parametrize(
    ("action", "mentions"),
    [
        ("garbage", "Hello, I am no f"),
        ("huge", "declares 4294967295"),
        ("wrong-id", "request 999999, which was never made"),
    ],
)
async def test_a_worker_that_breaks_the_protocol_is_killed_and_shown(
    tmp_path: Path, action: str, mentions: str
) -> None:
    worker = await start(tmp_path, at_token={"1": action, "2": "hang"})
    pid = worker.pid
    error = await failure_of(worker)
    assert error.code == "protocol-error"
    assert mentions in error.message
    assert not psutil.pid_exists(pid)


async def test_a_worker_that_closes_its_connection_and_lives_on_is_killed(tmp_path: Path) -> None:
    worker = await start(tmp_path, at_token={"1": "close"})
    assert (await failure_of(worker)).code == "connection-closed"


async def test_a_worker_that_holds_the_gil_is_killed_as_silent(tmp_path: Path) -> None:
    limits = replace(LIMITS, heartbeat_timeout_s=1.6)
    worker = await start(tmp_path, limits, at_token={"1": "gil"})
    began = time.monotonic()
    error = await failure_of(worker)
    assert error.code == "worker-silent"
    assert dict(error.facts)["limit"] == "1.6 s"
    assert time.monotonic() - began < 5


async def test_a_worker_that_is_busy_without_progress_is_killed_as_stalled(tmp_path: Path) -> None:
    worker = await start(tmp_path, replace(LIMITS, stall_timeout_s=1.6), at_token={"1": "hang"})
    error = await failure_of(worker)
    assert error.code == "worker-stalled"
    assert dict(error.facts)["progress"] > 0


async def test_long_work_with_progress_is_no_stall_and_idleness_neither(tmp_path: Path) -> None:
    worker = await start(tmp_path, replace(LIMITS, stall_timeout_s=1.5), token_s=0.25)
    assert await tokens(worker, prompt(0, 8)) == list(range(1, 9))
    await asyncio.sleep(2.0)
    assert not worker.ended.done()
    await worker.stop()


@pytest.mark.parametrize(
    ("script", "edits", "kind", "code", "mentions"),
    [
        ({}, {">=1,<2": ">=99,<100"}, PluginError, "protocol-mismatch", "99"),
        ({"plugin_version": "2.0"}, {}, PluginError, "manifest-disagrees", "'2.0'"),
        ({"at_start": "import-error"}, {}, WorkerFailedError, "plugin-load-failed", "vox_scripted_native"),
        ({"self_test_cases": 0}, {}, WorkerFailedError, "self-test-failed", "0 cases"),
    ],
)
async def test_a_refusal_is_an_error_of_its_kind_and_nothing_is_left(
    tmp_path: Path, script: dict, edits: dict, kind: type[VoxError], code: str, mentions: str
) -> None:
    before = {child.pid for child in psutil.Process().children()}
    with pytest.raises(kind) as caught:
        await Worker.start(scripted_worker_env(tmp_path, script, manifest_edits=edits), LIMITS)
    assert caught.value.code == code
    assert mentions in caught.value.message
    assert caught.value.remedy
    assert {child.pid for child in psutil.Process().children()} == before


async def test_a_protocol_skew_shows_both_ranges_and_the_manifest(tmp_path: Path) -> None:
    plan = scripted_worker_env(tmp_path, manifest_edits={">=1,<2": ">=2,<5"})
    with pytest.raises(PluginError) as caught:
        await Worker.start(plan, LIMITS)
    facts = dict(caught.value.facts)
    assert (facts["manifest_protocol"], facts["host_protocol"]) == ("2 to 4", "1")
    assert "speaks protocol 2 to 4" in caught.value.message
    assert "this host 1" in caught.value.message
    assert "Plugin.toml" in caught.value.message


@pytest.mark.parametrize(
    ("change", "code"),
    [({"manifest_digest": "00" * 32}, "manifest-mismatch"), ({"plugin_version": "1.0.1"}, "wrong-worker")],
)
async def test_a_plugin_that_is_not_the_verified_one_is_an_integrity_error(
    tmp_path: Path, change: dict[str, str], code: str
) -> None:
    with pytest.raises(IntegrityError) as caught:
        await Worker.start(replace(scripted_worker_env(tmp_path), **change), LIMITS)
    assert caught.value.code == code
    assert {"expected", "found"} <= dict(caught.value.facts).keys()


@pytest.mark.parametrize(
    ("hello", "kind", "code", "mentions"),
    [
        ({}, IntegrityError, "wrong-worker", "nonce"),
        ({"plugin_id": "vox-other"}, IntegrityError, "wrong-worker", "plugin"),
        ({"magic": "vox-plug"}, IntegrityError, "wrong-worker", "magic"),
        ({"manifest_digest": "00" * 32}, IntegrityError, "wrong-worker", "manifest"),
        (
            {"protocol": {"min": 2, "max": 7}},
            PluginError,
            "protocol-mismatch",
            "2 to 7, this host 1",
        ),
    ],
)
async def test_a_hello_that_lies_is_refused_by_the_host(
    tmp_path: Path, hello: dict, kind: type[VoxError], code: str, mentions: str
) -> None:
    with pytest.raises(kind) as caught:
        await Worker.start(scripted_worker_env(tmp_path, {"hello": hello}), LIMITS)
    assert caught.value.code == code
    assert mentions in caught.value.message


@pytest.mark.parametrize("action", ["crash", "exit"])
async def test_a_worker_that_dies_before_its_handshake_says_so(tmp_path: Path, action: str) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        await Worker.start(scripted_worker_env(tmp_path, {"at_start": action}), LIMITS)
    assert caught.value.code == "worker-died"
    assert "before its handshake" in caught.value.message


@pytest.mark.parametrize("action", ["hang", "gil"])
async def test_a_worker_that_hangs_before_its_handshake_is_killed(tmp_path: Path, action: str) -> None:
    limits = replace(LIMITS, handshake_timeout_s=0.7)
    began = time.monotonic()
    with pytest.raises(WorkerFailedError) as caught:
        await Worker.start(scripted_worker_env(tmp_path, {"at_start": action}), limits)
    assert caught.value.code == "handshake-timeout"
    assert time.monotonic() - began < 3


async def test_an_interpreter_that_is_not_there_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    plan = replace(scripted_worker_env(tmp_path), python=tmp_path / "absent")
    with pytest.raises(WorkerFailedError) as caught:
        await Worker.start(plan, LIMITS)
    assert caught.value.code == "worker-not-started"
    assert "plugin verify vox-scripted" in (caught.value.remedy or "")


@pytest.mark.parametrize("action", [None, "hang", "gil"])
async def test_stopping_ends_even_a_worker_that_does_not_listen(tmp_path: Path, action: str | None) -> None:
    worker = await start(tmp_path, token_s=0.01, at_token={"1": "ignore-sigterm", "2": action})
    task = asyncio.create_task(tokens(worker, prompt(0, 400)))
    await asyncio.sleep(0.2)
    began = time.monotonic()
    await worker.stop()
    assert time.monotonic() - began < 3
    assert not psutil.pid_exists(worker.pid)
    with pytest.raises(WorkerFailedError) as caught:
        await task
    assert caught.value.code == "worker-stopped"


async def test_leaving_an_answer_cancels_it_within_a_token(tmp_path: Path) -> None:
    worker = await start(tmp_path, token_s=0.05)
    async with aclosing(worker.stream("generate", prompt(0, 400))) as events:
        async for _ in events:
            break
    began = time.monotonic()
    assert await tokens(worker, prompt(7, 1)) == [8]
    assert time.monotonic() - began < 1.0
    log = Path(scripted_log(tmp_path)).read_text()
    ended_after = int(log.split("generation ended after ")[1].split()[0])
    assert ended_after <= 4
    await worker.stop()


def scripted_log(tmp_path: Path) -> Path:
    (path,) = (tmp_path / "log").iterdir()
    return path


async def test_a_worker_writes_nothing_into_its_installed_tree(tmp_path: Path) -> None:
    worker = await start(tmp_path)
    await tokens(worker, prompt(0))
    await worker.stop()
    assert list((tmp_path / "env").rglob("*.pyc")) == []


async def test_many_workers_leave_no_descriptor_thread_or_process_behind(tmp_path: Path) -> None:
    plan = scripted_worker_env(tmp_path, {"at_token": {"1": "start-child"}})

    async def one_life(*, violent: bool) -> None:
        worker = await Worker.start(plan, LIMITS)
        await worker.call("load_model", MODEL)
        await tokens(worker, prompt(0))
        if violent:
            os.kill(worker.pid, signal.SIGKILL)
            await worker.ended
        await worker.stop()

    def held() -> tuple[set[str], set[int]]:
        return set(os.listdir("/dev/fd")), {thread.id for thread in psutil.Process().threads()}

    await one_life(violent=False)
    before = held()
    for number in range(4):
        await one_life(violent=number % 2 == 1)
    # What is new is left over; what is gone may be an earlier test's that ended only now.
    deadline = time.monotonic() + 5
    while any(now - then for now, then in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    descriptors, threads = held()
    assert (descriptors - before[0], threads - before[1]) == (set(), set())
    assert psutil.Process().children(recursive=True) == []
