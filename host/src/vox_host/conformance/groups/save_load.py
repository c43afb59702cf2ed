"""A model that is unloaded is gone, and loaded again it is the same model."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vox_host.conformance.expected import load_models
from vox_host.conformance.grading import grade_rows
from vox_host.conformance.session import NotOfferedError, Session, case, failed, in_time
from vox_host.conformance.verdict import CaseResult
from vox_host.errors import VoxError
from vox_host.workers import Worker
from vox_plugin_api import messages as m

__all__ = ["run"]


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield the results."""
    models = load_models()[0]["models"]
    first, second, *_ = models
    async with session.worker() as worker:
        kept: list[list[list[Any]]] = []
        yield await case("load", _answer(session, worker, first, kept))
        unloaded = await case("unload", _unload(session, worker))
        yield unloaded
        if unloaded.is_skipped:
            return
        yield await case("another model in its place", _answer(session, worker, second, []))
        yield await case("unload again", _unload(session, worker))
        again: list[list[list[Any]]] = []
        yield await case("the first model again", _answer(session, worker, first, again))
        grade: Any = "bitwise" if session.is_canonical else None
        yield await case("same bytes before and after", _same(kept, again), grade)
    async with session.worker() as worker:
        fresh: list[list[list[Any]]] = []
        yield await case("load in a new process", _answer(session, worker, first, fresh))
        yield await case("same bytes in a new process", _same(kept, fresh), grade)


async def _answer(
    session: Session, worker: Worker, name: str, kept: list[list[list[Any]]]
) -> CaseResult | None:
    await session.load(worker, name)
    recorded = next(iter(load_models()[0]["models"][name]["answers"].values()))
    params = m.GenerateParams.model_validate(recorded["params"])
    if not session.is_canonical:
        params = params.model_copy(update={"logprobs": None})
    kept.append((await session.generate(worker, params)).as_rows())
    return None


async def _unload(session: Session, worker: Worker) -> CaseResult | None:
    try:
        await in_time(worker.call("unload", m.UnloadParams()))
    except VoxError as error:
        if error.code == "not-supported":
            raise NotOfferedError("the plugin cannot unload a model") from None
        raise
    try:
        await session.generate(worker, m.GenerateParams(token_ids=[1], max_tokens=1))
    except VoxError as error:
        # A refusal of the request: the worker itself must be there still.
        return failed(f"it ended: {error.message}") if worker.ended.done() else None
    return failed("it answered from a model that was unloaded")


async def _same(before: list[list[list[Any]]], after: list[list[list[Any]]]) -> CaseResult | None:
    if not before or not after:
        return failed("there are no two answers to compare")
    result = grade_rows(before[0], after[0], group="save-load", case="")
    return result if result.is_failed else None
