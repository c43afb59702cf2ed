"""Take the steps on one side after the other, and follow a difference to an operator of the suite."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

from vox_host.conformance.compare import first_difference
from vox_host.conformance.expected import load_group
from vox_host.counted import counted
from vox_host.launch import plan_launch
from vox_host.parity.run import Job, loaded
from vox_host.parity.sides import Side
from vox_host.parity.training import Taken, TrainingAsked, TrainingParting
from vox_host.resolution import Candidate
from vox_host.workers import Event, Limits, Worker
from vox_host.workers.training import TrainingClient
from vox_plugin_api.conformance_messages import ConformanceParams, ConformanceResult

__all__ = ["locate_operator", "take_steps"]

_GROUPS = ("operators", "backward", "updates")


async def take_steps(
    job: Job, side: Side, candidate: Candidate, training: TrainingAsked
) -> tuple[Taken, ...]:
    """Return what a side made of every step, the adapter before the first one included.

    Raises:
        VoxError: the plugin can't be started, can't load the model, or doesn't take a step.
    """
    job.say(f"{side.label}: {counted(training.steps, 'step')} of training")
    async with loaded(job, side, candidate, None) as (worker, _, _):
        client = TrainingClient(worker)
        begun = Taken.begun(await client.begin(training.begin))
        steps = [Taken.of(await client.step(training.examples)) for _ in range(training.steps)]
    return (begun, *steps)


async def locate_operator(
    job: Job, parting: TrainingParting, first: tuple[Side, Candidate], other: tuple[Side, Candidate]
) -> TrainingParting:
    """Name the first case of the suite that two sides answer with other bytes: a step has no trace.

    Cases have operands of their own, so a difference that needs the model's is not found; the parting
    then comes back as it was.
    """
    job.say("asking both sides for the suite's operators")
    async with _worker(job, first[1]) as one, _worker(job, other[1]) as two:
        for group in _GROUPS:
            for case in load_group(group).cases:
                ours = await _answer(job, one, first[0], group, case.name)
                theirs = await _answer(job, two, other[0], group, case.name)
                if (found := _apart(parting, case.name, ours, theirs)) is not None:
                    return found
    return parting


def _apart(parting: TrainingParting, case: str, ours: Event, theirs: Event) -> TrainingParting | None:
    a, b = (ConformanceResult.model_validate(event.result) for event in (ours, theirs))
    if a.definition != b.definition or (ours.payloads == theirs.payloads and a.faults == b.faults):
        return None
    named = replace(parting, operator=case.split("/")[0], case=case)
    for output, expected, found in zip(a.outputs, ours.payloads, theirs.payloads, strict=False):
        difference = first_difference(
            expected, found, dtype=output.dtype, shape=output.shape, operator=output.operator
        )
        if difference is not None:
            return replace(
                named,
                element=difference.element,
                operator_expected=difference.expected,
                operator_found=difference.found,
            )
    return named


async def _answer(job: Job, worker: Worker, side: Side, group: str, case: str) -> Event:
    params = ConformanceParams(
        group=group, case=case, threads=job.threads, lane_options=dict(side.lane_options)
    )
    return await worker.call("conformance", params)


@asynccontextmanager
async def _worker(job: Job, candidate: Candidate) -> AsyncGenerator[Worker, None]:
    settings = job.settings
    plan = await asyncio.to_thread(
        plan_launch, candidate, plugins_dir=settings.plugins_dir, log_dir=settings.log_dir
    )
    worker = await Worker.start(plan, Limits())
    try:
        yield worker
    finally:
        await worker.stop()
