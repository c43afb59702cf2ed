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
from vox_host.app.engine import WorkerEngine
from vox_host.errors import IntegrityError, WorkerFailedError
from vox_host.workers import LaunchPlan, Limits, Supervisor, Worker, WorkerState
from vox_plugin_api import messages as m
from vox_plugin_api.transcript import Transcript

LIMITS = Limits(
    handshake_timeout_s=20.0,
    heartbeat_timeout_s=10.0,
    shutdown_grace_s=1.0,
    terminate_grace_s=0.5,
    backoff_s=0.02,
    ready_timeout_s=15.0,
)
MODEL = m.LoadModelParams(model_dir="/nowhere", model_digest="cd" * 32)


async def load(worker: Worker) -> None:
    await worker.call("load_model", MODEL)


def prompt(first: int, max_tokens: int = 5, **more: Any) -> m.GenerateParams:
    return m.GenerateParams(
        token_ids=[first], max_tokens=max_tokens, sampling=m.SamplingParams(temperature=0.0), **more
    )


class Watched:
    """A supervisor and every state it was in."""

    def __init__(
        self, tmp_path: Path, limits: Limits = LIMITS, *, prepare: Any = load, **script: Any
    ) -> None:
        self.states: list[WorkerState] = []
        self.supervisor = Supervisor(
            scripted_worker_env(tmp_path, script),
            prepare=prepare,
            on_state=self.states.append,
            limits=limits,
        )

    async def __aenter__(self) -> "Watched":
        await self.supervisor.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.supervisor.stop()

    @property
    def phases(self) -> list[str]:
        """The phases, repetitions left out."""
        phases = [state.phase for state in self.states]
        return [phase for i, phase in enumerate(phases) if i == 0 or phases[i - 1] != phase]

    async def tokens(self, params: m.GenerateParams) -> list[int]:
        found: list[int] = []
        async with aclosing(self.supervisor.stream("generate", params)) as events:
            async for event in events:
                found += [token["token_id"] for token in event.result["tokens"]]
        return found

    async def until(self, phase: str) -> None:
        deadline = time.monotonic() + 10
        while self.supervisor.state.phase != phase:
            assert time.monotonic() < deadline, self.supervisor.state
            await asyncio.sleep(0.005)


async def test_a_life_without_trouble_is_starting_ready_stopped(tmp_path: Path) -> None:
    async with Watched(tmp_path) as watched:
        pid = watched.supervisor.state.pid
        assert pid is not None
        assert psutil.pid_exists(pid)
        assert await watched.tokens(prompt(0)) == [1, 2, 3, 4, 5]
        result = await watched.supervisor.call("evaluate", m.EvaluateParams(sequences=[[1], [2, 3]]))
        assert result.final
        assert result.result["index"] == 1
    assert not psutil.pid_exists(pid)
    assert watched.phases == ["starting", "ready", "stopped"]
    await watched.supervisor.stop()


async def test_the_model_is_loaded_before_a_request_and_again_after_a_restart(tmp_path: Path) -> None:
    loads: list[int] = []

    async def prepare(worker: Worker) -> None:
        loads.append(worker.pid)
        await load(worker)

    async with Watched(tmp_path, prepare=prepare) as watched:
        os.kill(loads[0], signal.SIGKILL)
        await watched.until("restarting")
        assert await watched.tokens(prompt(0, 2)) == [1, 2]
        assert len(set(loads)) == 2
        assert watched.supervisor.state.pid == loads[1]


async def test_sigkill_in_a_stream_is_a_typed_error_at_once_and_the_next_request_is_served(
    tmp_path: Path,
) -> None:
    async with Watched(tmp_path, token_s=0.02) as watched:
        received: list[int] = []
        with pytest.raises(WorkerFailedError) as caught:
            async for event in watched.supervisor.stream("generate", prompt(0, 400)):
                received += [token["token_id"] for token in event.result["tokens"]]
                if len(received) == 5:
                    killed = time.monotonic()
                    os.kill(watched.supervisor.state.pid, signal.SIGKILL)
        assert time.monotonic() - killed < 5
        assert caught.value.code == "worker-died"
        assert dict(caught.value.facts)["exit"].startswith("signal 9 (SIGKILL)")
        assert received == list(range(1, len(received) + 1))
        assert await watched.tokens(prompt(50, 3)) == [51, 52, 53]
        assert watched.phases == ["starting", "ready", "restarting", "ready"]
        assert watched.supervisor.state.restarts == 1
        assert watched.supervisor.state.last_error is caught.value


async def test_every_request_in_flight_gets_the_error_and_none_is_replayed(tmp_path: Path) -> None:
    async with Watched(tmp_path, token_s=0.02) as watched:
        tasks = [asyncio.create_task(watched.tokens(prompt(100 * n, 400))) for n in range(3)]
        await asyncio.sleep(0.3)
        os.kill(watched.supervisor.state.pid, signal.SIGKILL)
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [result.code for result in results] == ["worker-died"] * 3
        await watched.until("ready")
        assert await watched.tokens(prompt(0, 1)) == [1]
    logs = "".join(path.read_text() for path in (tmp_path / "log").iterdir())
    assert logs.count("generation ended") == 1, "only the request made after the restart was served"


async def test_restarts_are_bounded_and_then_every_request_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vox_host.workers")
    limits = replace(LIMITS, max_restarts=2)
    async with Watched(tmp_path, limits, at_token={"0": "crash"}) as watched:
        for _ in range(3):
            with pytest.raises(WorkerFailedError, match="exited while it was in use"):
                await watched.tokens(prompt(0))
        await watched.until("failed")
        began = time.monotonic()
        with pytest.raises(WorkerFailedError) as caught:
            await watched.tokens(prompt(0))
        assert time.monotonic() - began < 5
        assert caught.value.code == "worker-failed"
        assert "ended 3 times within" in caught.value.message
        assert "signal 9 (SIGKILL)" in caught.value.message
        assert caught.value.remedy.startswith("Restart `vox-host serve`")
        [given_up] = [r.getMessage() for r in caplog.records if r.levelname == "ERROR"]
        assert "ended 3 times within" in given_up
        assert "Restart `vox-host serve`" in given_up
        assert sum("SIGKILL" in r.getMessage() for r in caplog.records if r.levelname == "INFO") == 3
        health = WorkerEngine(watched.supervisor).health()
        assert (health.is_ready, health.state) == (False, "failed")
        assert health.detail == f"{watched.supervisor.state.given_up.message}. {caught.value.remedy}"
        assert dict(caught.value.facts)["restarts"] == 2
        assert dict(caught.value.facts)["exit"].startswith("signal 9")
        assert watched.supervisor.state.pid is None
        assert watched.phases == ["starting", *["ready", "restarting"] * 3, "failed"]
        assert psutil.Process().children() == []


async def test_a_worker_that_served_long_enough_starts_a_new_row_of_restarts(tmp_path: Path) -> None:
    limits = replace(LIMITS, max_restarts=1, healthy_after_s=0.0)
    async with Watched(tmp_path, limits, at_token={"0": "crash"}) as watched:
        for restarts in range(3):
            with pytest.raises(WorkerFailedError):
                await watched.tokens(prompt(0))
            await watched.until("restarting")
            await watched.until("ready")
            assert watched.supervisor.state.restarts == restarts + 1


async def test_the_pause_before_a_restart_doubles(tmp_path: Path) -> None:
    limits = replace(LIMITS, backoff_s=0.2, max_restarts=3)
    flag = tmp_path / "started"
    async with Watched(tmp_path, limits) as watched:
        # From now on each start fails: the environment of the plugin is gone.
        (tmp_path / "env" / "bin" / "python").unlink()
        began = time.monotonic()
        os.kill(watched.supervisor.state.pid, signal.SIGKILL)
        await watched.until("failed")
        assert 1.4 <= time.monotonic() - began < 5  # 0.2 + 0.4 + 0.8
        assert watched.supervisor.state.last_error.code == "worker-not-started"
    assert not flag.exists()


async def test_a_request_waits_for_a_restart_no_longer_than_the_limit(tmp_path: Path) -> None:
    limits = replace(LIMITS, backoff_s=5.0, ready_timeout_s=0.3)
    async with Watched(tmp_path, limits) as watched:
        os.kill(watched.supervisor.state.pid, signal.SIGKILL)
        await watched.until("restarting")
        began = time.monotonic()
        with pytest.raises(WorkerFailedError) as caught:
            await watched.tokens(prompt(0))
        assert caught.value.code == "worker-not-ready"
        assert 0.25 < time.monotonic() - began < 5


async def test_stopping_during_a_restart_ends_all_waiting(tmp_path: Path) -> None:
    async with Watched(tmp_path, replace(LIMITS, backoff_s=5.0)) as watched:
        os.kill(watched.supervisor.state.pid, signal.SIGKILL)
        await watched.until("restarting")
        waiting = asyncio.create_task(watched.tokens(prompt(0)))
        await asyncio.sleep(0.05)
        await watched.supervisor.stop()
        with pytest.raises(WorkerFailedError) as caught:
            await waiting
        assert caught.value.code == "worker-stopped"


async def test_a_first_start_that_fails_is_told_and_not_repeated(tmp_path: Path) -> None:
    watched = Watched(tmp_path, at_start="crash")
    with pytest.raises(WorkerFailedError) as caught:
        await watched.supervisor.start()
    assert caught.value.code == "worker-died"
    assert watched.phases == ["starting", "failed"]
    assert len(list((tmp_path / "log").iterdir())) == 1


@pytest.mark.parametrize(
    ("action", "code"), [("crash", "worker-died"), ("raise", "internal"), ("error", "scripted-error")]
)
async def test_a_model_that_cannot_be_loaded_fails_the_start_and_leaves_nothing(
    tmp_path: Path, action: str, code: str
) -> None:
    watched = Watched(tmp_path, at_load=action)
    with pytest.raises(WorkerFailedError) as caught:
        await watched.supervisor.start()
    assert caught.value.code == code
    assert watched.supervisor.state.phase == "failed"
    assert psutil.Process().children() == []


async def test_each_restart_asks_for_a_plan_and_a_changed_plugin_is_not_started_again(tmp_path: Path) -> None:
    plan = scripted_worker_env(tmp_path)
    renewed = 0

    async def renew() -> LaunchPlan:
        nonlocal renewed
        renewed += 1
        if renewed == 2:
            raise IntegrityError("integrity-mismatch", "the bytes have changed; it was not started")
        return replace(plan, log_dir=tmp_path / "log-of-the-second")

    supervisor = Supervisor(plan, renew=renew, prepare=load, limits=LIMITS)
    watched = Watched.__new__(Watched)
    watched.supervisor = supervisor
    await supervisor.start()
    os.kill(supervisor.state.pid, signal.SIGKILL)
    await watched.until("restarting")
    await watched.until("ready")
    assert len(list((tmp_path / "log-of-the-second").iterdir())) == 1
    os.kill(supervisor.state.pid, signal.SIGKILL)
    await watched.until("failed")
    assert (renewed, supervisor.state.last_error.code) == (2, "integrity-mismatch")
    with pytest.raises(WorkerFailedError) as caught:
        await watched.tokens(prompt(0))
    assert "the bytes have changed" in dict(caught.value.facts)["last error"]
    await supervisor.stop()


async def test_a_mistake_in_prepare_at_a_restart_ends_in_failed_and_is_raised(tmp_path: Path) -> None:
    calls = 0

    async def prepare(worker: Worker) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise ValueError("our own mistake")
        await load(worker)

    watched = Watched(tmp_path, prepare=prepare)
    await watched.supervisor.start()
    os.kill(watched.supervisor.state.pid, signal.SIGKILL)
    await watched.until("failed")
    with pytest.raises(WorkerFailedError, match="failed unexpectedly"):
        await watched.tokens(prompt(0))
    with pytest.raises(ValueError, match="our own mistake"):
        await watched.supervisor.stop()
    assert psutil.Process().children() == []


async def test_starting_twice_is_refused_and_starting_again_after_a_stop_works(tmp_path: Path) -> None:
    async with Watched(tmp_path) as watched:
        with pytest.raises(WorkerFailedError, match="running already"):
            await watched.supervisor.start()
        await watched.supervisor.stop()
        with pytest.raises(WorkerFailedError, match="is not running"):
            await watched.tokens(prompt(0))
        await watched.supervisor.start()
        assert await watched.tokens(prompt(0, 1)) == [1]


async def test_leaving_a_stream_cancels_and_the_worker_serves_on(tmp_path: Path) -> None:
    async with Watched(tmp_path, token_s=0.05) as watched:
        task = asyncio.create_task(watched.tokens(prompt(0, 400)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        began = time.monotonic()
        assert await watched.tokens(prompt(7, 1)) == [8]
        assert time.monotonic() - began < 5
        assert watched.phases == ["starting", "ready"]


async def test_two_runs_of_the_same_requests_give_the_same_transcript(tmp_path: Path) -> None:
    async def run(name: str, *, delays: tuple[float, float]) -> bytes:
        (tmp_path / name).mkdir()
        path = tmp_path / name / "transcript"
        model = m.LoadModelParams(model_dir=str(tmp_path / name), model_digest="cd" * 32, threads=len(name))

        async def prepare(worker: Worker) -> None:
            await worker.call("load_model", model)

        with Transcript(path) as transcript:
            supervisor = Supervisor(
                scripted_worker_env(tmp_path / name, {"token_s": 0.002, "load_steps": len(name)}),
                prepare=prepare,
                transcript=transcript,
                limits=LIMITS,
            )
            await supervisor.start()

            async def ask(number: int) -> None:
                async for _ in supervisor.stream("generate", prompt(100 * number, 20, logprobs=2)):
                    await asyncio.sleep(delays[number])

            await asyncio.gather(ask(0), ask(1))
            with pytest.raises(WorkerFailedError):
                await supervisor.call("generate", prompt(0, 5000))
            await supervisor.call("trace", m.TraceParams(token_ids=[1, 2], slices=["logits"]))
            await supervisor.stop()
        return path.read_bytes()

    first = await run("a", delays=(0.0, 0.01))
    second = await run("a-longer-name", delays=(0.01, 0.0))
    assert first == second
    lines = first.decode().splitlines()
    assert len(lines) == 1 + 2 + 2 * 21 + 2 + 3
    for local in ("pid", "observation", "nonce", str(tmp_path), '"id"'):
        assert local not in first.decode()
