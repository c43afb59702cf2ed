"""Ask a worker to train: the protocol's training methods, typed.

Nothing here is ever sent twice. A step whose answer did not come may or may not have been taken,
and a worker that was started again knows no training: who drives a run goes on from its last save.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from vox_host.errors import PluginError
from vox_host.workers.connection import Event
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t

__all__ = ["TrainingClient", "TrainingPlan", "TrainingWorker"]

R = TypeVar("R", bound=m.Message)


class TrainingWorker(Protocol):
    """What a `Worker` is to its client."""

    @property
    def hello(self) -> m.WorkerHello: ...

    async def call(self, method: m.Method, params: m.Message) -> Event: ...

    def stream(self, method: m.Method, params: m.Message) -> AsyncGenerator[Event, None]: ...


@dataclass(frozen=True, slots=True)
class TrainingPlan:
    """What a run would be."""

    adapter: t.TrainPlanResult
    memory: t.TrainMemory
    """On this machine, by this worker's lane."""


class TrainingClient:
    """One worker's training. It belongs to that worker, not to one started in its place."""

    def __init__(self, worker: TrainingWorker) -> None:
        """Nothing is sent.

        Raises:
            PluginError: the worker's plugin doesn't train.
        """
        hello = worker.hello
        if "train" not in hello.capabilities:
            raise PluginError(
                "not-supported",
                f'plugin "{hello.plugin_id}" has no capability "train"; nothing was begun',
                facts=[("capabilities", ", ".join(hello.capabilities))],
                remedy="`vox-host plugin list` shows what each plugin can do.",
            )
        self._worker = worker

    async def plan(self, params: t.TrainPlanParams) -> TrainingPlan:
        """Ask what a run would be and what memory it would take; nothing is begun or allocated.

        Raises:
            VoxError: the worker's own error, or how it ended.
        """
        event = await self._worker.call("train_plan", params)
        return TrainingPlan(
            t.TrainPlanResult.model_validate(event.result), t.TrainMemory.model_validate(event.observation)
        )

    async def begin(self, params: t.TrainBeginParams) -> t.TrainBeginResult:
        """Make an adapter of the loaded model, or go on from a save.

        Raises:
            VoxError: the worker's own error, or how it ended.
        """
        if params.resume_dir is not None:
            # The worker has a working directory of its own.
            params = params.model_copy(update={"resume_dir": str(Path(params.resume_dir).absolute())})
        return await self._call("train_begin", params, t.TrainBeginResult)

    async def step(self, examples: Sequence[t.TrainExample]) -> t.TrainStepResult:
        """Take one optimizer step.

        Raises:
            VoxError: the worker's own error (the step was not taken), or how it ended.
        """
        params = t.TrainStepParams(examples=list(examples))
        return await self._call("train_step", params, t.TrainStepResult)

    async def evaluate(
        self, examples: Sequence[t.TrainExample], *, logits_digest: bool = False
    ) -> list[t.TrainEvaluateResult]:
        """Return the loss of each example, in order; nothing is updated.

        Raises:
            VoxError: the worker's own error, or how it ended.
        """
        params = t.TrainEvaluateParams(examples=list(examples), logits_digest=logits_digest)
        async with contextlib.aclosing(self._worker.stream("train_evaluate", params)) as events:
            return [
                t.TrainEvaluateResult.model_validate(event.result)
                async for event in events
                if event.result is not None
            ]

    async def save(self, folder: str) -> t.TrainSaveResult:
        """Have the worker write a new folder, whole or not at all.

        Raises:
            VoxError: the worker's own error (the folder is not there), or how it ended.
        """
        params = t.TrainSaveParams(folder=str(Path(folder).absolute()))
        return await self._call("train_save", params, t.TrainSaveResult)

    async def _call(self, method: m.Method, params: m.Message, result: type[R]) -> R:
        event = await self._worker.call(method, params)
        return result.model_validate(event.result)
