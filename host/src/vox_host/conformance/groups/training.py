"""Steps of training: losses, gradient norms and adapters, in one go, in other micro-batches, and resumed."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

from vox_host.conformance.compare import Difference
from vox_host.conformance.expected import load_models
from vox_host.conformance.session import NotOfferedError, Session, case, failed, in_time
from vox_host.conformance.verdict import CaseResult
from vox_host.counted import counted
from vox_host.workers import Worker
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t

__all__ = ["run"]


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield the results.

    Raises:
        NotOfferedError: the plugin does not train, or promises no bits.
    """
    session.require("train")
    if not session.is_canonical:
        raise NotOfferedError("the plugin has its own numerics (fast); no tolerance for training is derived")
    for name, model in load_models()[0]["models"].items():
        recorded = model["training"]
        steps = len(recorded["steps"])
        folder = session.folder / f"{name}-saved"
        async with session.worker() as worker:
            yield await case(f"{name}/begin", _begin(session, worker, name, recorded, {}), "bitwise")
            for step in range(steps):
                if step == steps // 2:
                    yield await case(f"{name}/save", _save(worker, folder, None))
                yield await case(f"{name}/step {step + 1}", _step(worker, name, recorded, step), "bitwise")
            yield await case(f"{name}/evaluate", _evaluate(worker, name, recorded), "bitwise")
            end = session.folder / f"{name}-end"
            yield await case(f"{name}/save at the end", _save(worker, end, recorded["files"]), "bitwise")
        async with session.worker() as worker:
            small = {"micro_batch_size": 1}
            yield await case(
                f"{name}/begin, one at a time", _begin(session, worker, name, recorded, small), "bitwise"
            )
            for step in range(steps):
                title = f"{name}/step {step + 1}, one example at a time"
                yield await case(title, _step(worker, name, recorded, step), "bitwise")
        async with session.worker() as worker:
            yield await case(f"{name}/resume", _resume(session, worker, name, folder))
            for step in range(steps // 2, steps):
                title = f"{name}/step {step + 1}, resumed"
                yield await case(title, _step(worker, name, recorded, step), "bitwise")


async def _begin(
    session: Session, worker: Worker, name: str, recorded: Mapping[str, Any], changes: Mapping[str, Any]
) -> CaseResult | None:
    await session.load(worker, name)
    params = t.TrainBeginParams.model_validate({**recorded["begin"], **changes})
    event = await in_time(worker.call("train_begin", params))
    found = t.TrainBeginResult.model_validate(event.result).model_dump(mode="json")
    return _compare("train_begin", name, 0, recorded["begun"], found)


async def _resume(session: Session, worker: Worker, name: str, folder: Path) -> CaseResult | None:
    await session.load(worker, name)
    await in_time(worker.call("train_begin", t.TrainBeginParams(resume_dir=str(folder))))
    return None


async def _step(worker: Worker, name: str, recorded: Mapping[str, Any], step: int) -> CaseResult | None:
    entry = recorded["steps"][step]
    params = t.TrainStepParams.model_validate({"examples": entry["examples"]})
    event = await in_time(worker.call("train_step", params))
    found = t.TrainStepResult.model_validate(event.result).model_dump(mode="json")
    return _compare("train_step", name, step, entry["result"], found)


async def _evaluate(worker: Worker, name: str, recorded: Mapping[str, Any]) -> CaseResult | None:
    examples = recorded["steps"][0]["examples"]
    params = t.TrainEvaluateParams.model_validate({"examples": examples, "logits_digest": True})
    found: list[dict[str, Any]] = []

    async def collect() -> None:
        async with contextlib.aclosing(worker.stream("train_evaluate", params)) as events:
            results = [event.result async for event in events if event.result is not None]
        found.extend(t.TrainEvaluateResult.model_validate(r).model_dump(mode="json") for r in results)

    await in_time(collect())
    for index, (wanted, made) in enumerate(zip(recorded["evaluated"], found, strict=False)):
        if (result := _compare("train_evaluate", name, index, wanted, made)) is not None:
            return result
    return (
        None if len(found) == len(examples) else failed(f"{len(found)} of {counted(len(examples), 'result')}")
    )


async def _save(worker: Worker, folder: Path, files: Mapping[str, str] | None) -> CaseResult | None:
    event = await in_time(worker.call("train_save", t.TrainSaveParams(folder=str(folder))))
    saved = t.TrainSaveResult.model_validate(event.result)
    if files is not None and saved.files != files:
        return failed(f"expected the files {dict(files)}, found {saved.files}")
    return None


def _compare(
    method: m.Method, name: str, step: int, expected: Mapping[str, Any], found: Mapping[str, Any]
) -> CaseResult | None:
    for field, wanted in expected.items():
        if found.get(field) != wanted:
            difference = Difference(
                group="training",
                case=name,
                operator=method,
                name=field,
                element=step,
                expected=str(wanted),
                found=str(found.get(field)),
            )
            return failed(str(difference), difference)
    return None
