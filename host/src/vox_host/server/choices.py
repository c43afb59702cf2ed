"""Run the answers of one request side by side, and stop all of them when one fails or nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from vox_host.app.service import Answer, AnswerEnd, AnswerPiece, ModelService, PromptScores
from vox_plugin_api import messages as m

__all__ = ["Job", "collect_all", "stream_all"]


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to produce: choice `index` of its request."""

    index: int
    params: m.GenerateParams
    stops: tuple[str, ...] = ()


async def collect_all(service: ModelService, jobs: Sequence[Job], slots: asyncio.Semaphore) -> list[Answer]:
    """Return the whole answers, in the order of `jobs`; the first failure ends the others."""

    async def run(job: Job) -> Answer:
        async with slots:
            return await service.collect(job.params, job.stops)

    tasks = [asyncio.create_task(run(job)) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        await _end(tasks)


async def stream_all(
    service: ModelService, jobs: Sequence[Job], slots: asyncio.Semaphore
) -> AsyncGenerator[tuple[int, PromptScores | AnswerPiece | AnswerEnd], None]:
    """Yield the items of all answers as they come, each with its choice's index.

    Raises what the first failing answer raised.
    """
    if len(jobs) == 1:
        # Nothing to bring together: without a task and a queue in between, half as much is done for a token.
        [only] = jobs
        async with slots, contextlib.aclosing(service.answer(only.params, only.stops)) as items:
            async for item in items:
                yield only.index, item
        return
    # Bounded: an answer is not produced faster than its client reads it.
    queue: asyncio.Queue[tuple[int, PromptScores | AnswerPiece | AnswerEnd] | BaseException] = asyncio.Queue(
        16
    )

    async def run(job: Job) -> None:
        try:
            async with slots, contextlib.aclosing(service.answer(job.params, job.stops)) as items:
                async for item in items:
                    await queue.put((job.index, item))
        except asyncio.CancelledError:
            raise
        except BaseException as problem:  # noqa: BLE001 -- handed to the caller of the generator
            await queue.put(problem)

    tasks = [asyncio.create_task(run(job)) for job in jobs]
    try:
        unfinished = len(jobs)
        while unfinished:
            one = await queue.get()
            if isinstance(one, BaseException):
                raise one
            yield one
            unfinished -= isinstance(one[1], AnswerEnd)
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Task[object]] | Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
