"""Training over the real protocol, in a real worker of the CPU lane."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from fixtures.cpu_plugin import cpu_worker_env
from fixtures.scripted_plugin import scripted_worker_env
from lanes import every_lane
from lanes.tiny_models import BY_FAMILY, write_model
from lanes.training import a_config, some_examples
from vox_host.errors import PluginError, UsageError, WorkerFailedError
from vox_host.workers import LaunchPlan, Limits, TrainingClient, Worker
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t
from vox_plugin_api.transcript import Transcript

STEPS = 6
CONFIG = a_config(
    dropout=0.1, max_gradient_norm=1.0, schedule=t.Schedule(kind="cosine", warmup_steps=2, total_steps=STEPS)
)
NEW = t.TrainBeginParams(
    adapter=CONFIG.adapter, optimizer=CONFIG.optimizer, schedule=CONFIG.schedule, seed=CONFIG.seed
)


@pytest.fixture(scope="module")
def plan(request, tmp_path_factory) -> LaunchPlan:
    every_lane.make_training_lane("mens-cpu-ref", request.config)
    return cpu_worker_env(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), BY_FAMILY["qwen3"], seed=3)


@asynccontextmanager
async def training(
    plan: LaunchPlan, model: Path, *, threads: int = 1, transcript: Transcript | None = None
) -> AsyncIterator[tuple[Worker, TrainingClient]]:
    worker = await Worker.start(plan, Limits(), transcript)
    try:
        await worker.call(
            "load_model", m.LoadModelParams(model_dir=str(model), model_digest="cd" * 32, threads=threads)
        )
        yield worker, TrainingClient(worker)
    finally:
        await worker.stop()


def data(step: int) -> list[t.TrainExample]:
    return some_examples((9, 140, 3, 30), seed=step)


async def run(client: TrainingClient, first: int, last: int) -> list[t.TrainStepResult]:
    return [await client.step(data(step)) for step in range(first, last)]


async def test_a_run_that_is_killed_and_resumed_ends_in_the_same_bytes(
    plan: LaunchPlan, model: Path, tmp_path: Path
) -> None:
    async with training(plan, model) as (_, client):
        begun = await client.begin(NEW)
        whole = await run(client, 0, STEPS)
        saved_whole = await client.save(str(tmp_path / "whole"))
    assert begun.step == 0
    assert len(begun.matrices) == 3 * 7 + 2
    assert [outcome.step for outcome in whole] == list(range(1, STEPS + 1))

    async with training(plan, model, threads=2) as (worker, client):
        await client.begin(NEW.model_copy(update={"micro_batch_size": 1}))
        first = await run(client, 0, 2)
        await client.save(str(tmp_path / "step-2"))
        in_flight = asyncio.create_task(client.step(some_examples([600] * 20)))
        await asyncio.sleep(0.1)
        psutil.Process(worker.pid).kill()
        with pytest.raises(WorkerFailedError) as caught:
            await in_flight
        assert caught.value.code == "worker-died"
    async with training(plan, model) as (_, client):
        again = await client.begin(
            t.TrainBeginParams(resume_dir=str(tmp_path / "step-2"), micro_batch_size=3)
        )
        assert (again.step, again.adapter_digest) == (2, first[-1].adapter_digest)
        rest = await run(client, 2, STEPS)
        saved = await client.save(str(tmp_path / "resumed"))
    assert [*first, *rest] == whole
    assert saved == saved_whole
    for name in saved.files:
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


async def test_two_transcripts_of_one_run_are_equal(plan: LaunchPlan, model: Path, tmp_path: Path) -> None:
    written = []
    for name, size in (("one", 1), ("other", 4)):
        with Transcript(tmp_path / f"{name}.jsonl") as transcript:
            async with training(plan, model, transcript=transcript) as (_, client):
                await client.begin(NEW.model_copy(update={"micro_batch_size": size}))
                await run(client, 0, 2)
                scores = await client.evaluate(data(9), logits_digest=True)
                assert [score.index for score in scores] == [0, 1, 2, 3]
                await client.save(str(tmp_path / name))
        written.append((tmp_path / f"{name}.jsonl").read_bytes())
    assert written[0] == written[1]
    assert b"adapter_digest" in written[0]


async def test_a_step_that_its_caller_leaves_is_not_taken(plan: LaunchPlan, model: Path) -> None:
    async with training(plan, model) as (worker, client):
        await client.begin(NEW)
        long = asyncio.create_task(client.step(some_examples([600] * 20)))
        await asyncio.sleep(0.2)
        assert not long.done()
        long.cancel()
        with pytest.raises(asyncio.CancelledError):
            await long
        after = await client.step(data(0))
        assert after.step == 1
        await worker.call("unload", m.UnloadParams())
    async with training(plan, model) as (_, client):
        await client.begin(NEW)
        assert await client.step(data(0)) == after


async def test_mistakes_of_a_request_are_the_user_s_and_change_nothing(
    plan: LaunchPlan, model: Path, tmp_path: Path
) -> None:
    async with training(plan, model) as (_, client):
        with pytest.raises(WorkerFailedError) as caught:
            await client.step(data(0))
        assert caught.value.code == "no-training"
        lost = t.TrainBeginParams(
            adapter=CONFIG.adapter.model_copy(update={"targets": ["q_prj"]}), optimizer=CONFIG.optimizer
        )
        with pytest.raises(UsageError) as usage:
            await client.begin(lost)
        assert usage.value.code == "adapter-target"
        assert "'q_proj'" in usage.value.message
        await client.begin(NEW)
        bad = t.TrainExample(token_ids=[1, 97], loss_mask=[False, True])
        with pytest.raises(UsageError, match="example 1 has token 97 at position 1") as usage:
            await client.step([*data(0)[:1], bad])
        await client.save(str(tmp_path / "taken"))
        with pytest.raises(UsageError) as usage:
            await client.save(str(tmp_path / "taken"))
        assert usage.value.code == "folder-exists"
        assert (await client.step(data(0))).step == 1


async def test_serving_goes_on_beside_a_step(plan: LaunchPlan, model: Path) -> None:
    ask = m.GenerateParams(token_ids=[5], max_tokens=8, sampling=m.SamplingParams(temperature=0))
    async with training(plan, model) as (worker, client):

        async def answer() -> list[object]:
            return [event.result async for event in worker.stream("generate", ask)]

        alone = await answer()
        await client.begin(NEW)
        outcome, beside = await asyncio.gather(client.step(data(0)), answer())
        assert beside == alone, "the served model has no adapter"
    async with training(plan, model) as (_, client):
        await client.begin(NEW)
        assert await client.step(data(0)) == outcome


async def test_a_plugin_that_does_not_train_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    worker = await Worker.start(scripted_worker_env(tmp_path), Limits())
    try:
        with pytest.raises(PluginError, match='no capability "train"') as caught:
            TrainingClient(worker)
        assert caught.value.code == "not-supported"
        with pytest.raises(WorkerFailedError) as failed:
            await worker.call("train_begin", NEW)
        assert failed.value.code == "not-supported"
    finally:
        await worker.stop()
