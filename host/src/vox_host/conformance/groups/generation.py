"""Answers: greedy and drawn, short and long, alone and in company; what others ask changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from vox_host.conformance.expected import load_models
from vox_host.conformance.grading import grade_rows
from vox_host.conformance.session import Answer, Session, case, failed
from vox_host.conformance.verdict import CaseResult
from vox_host.counted import counted
from vox_host.workers import Worker
from vox_plugin_api import messages as m

__all__ = ["run"]


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield one result per answer, and per answer among others."""
    index, _ = load_models()
    for name, model in index["models"].items():
        answers = {
            title: recorded
            for title, recorded in model["answers"].items()
            # Chance is a matter of the numerics: only they say which token a seed draws.
            if session.is_canonical or recorded["params"]["sampling"]["temperature"] == "00000000"
        }
        async with session.worker() as worker:
            loaded = await case(f"{name}/load", _nothing(session.load(worker, name)))
            yield loaded
            if loaded.is_failed:
                continue
            alone: dict[str, Answer] = {}
            for title, recorded in answers.items():
                work = _alone(session, worker, model, f"{name}/{title}", recorded, alone)
                yield await case(f"{name}/{title}", work)
            yield await case(f"{name}/again", _again(session, worker, answers, alone))
            for title, result in (await _together(session, worker, answers, alone)).items():
                yield await case(f"{name}/{title} in company", _given(result), _grade(session))
        async with session.worker() as worker:
            yield await case(
                f"{name}/one thread, two at a time",
                _narrow(session, worker, name, answers, alone),
                _grade(session),
            )


def _grade(session: Session) -> Any:
    # Where no bits are promised, company is no part of the grade unless it changes something.
    return "bitwise" if session.is_canonical else None


async def _nothing(work: Any) -> CaseResult | None:
    await work
    return None


async def _given(result: CaseResult | None) -> CaseResult | None:
    return result


async def _alone(
    session: Session,
    worker: Worker,
    model: Mapping[str, Any],
    title: str,
    recorded: Mapping[str, Any],
    alone: dict[str, Answer],
) -> CaseResult | None:
    params = m.GenerateParams.model_validate(recorded["params"])
    if not session.is_canonical:
        params = params.model_copy(update={"logprobs": None})
    answer = await session.generate(worker, params)
    alone[title.split("/", 1)[1]] = answer
    result = grade_rows(
        recorded["rows"],
        answer.as_rows(),
        group="generation",
        case=title,
        tolerance=None if session.is_canonical else m.f32_from_bits(model["tolerance"]),
        margins=recorded["margins"],
    )
    parted = result.grade == "within tolerance"
    was_cut = parted and len(answer.tokens) < len(recorded["rows"]) and answer.finish_reason == "length"
    if was_cut:
        return failed(
            f"{result.detail}, and then it ended by 'length' after {counted(len(answer.tokens), 'token')}, "
            f"where {params.max_tokens} were asked for"
        )
    if not result.is_failed and not parted and answer.finish_reason != recorded["finish_reason"]:
        return failed(f"it ended by {answer.finish_reason!r}, expected {recorded['finish_reason']!r}")
    return result


async def _again(
    session: Session, worker: Worker, answers: Mapping[str, Any], alone: Mapping[str, Answer]
) -> CaseResult | None:
    """The first answer once more: nothing is left of those in between."""
    title, recorded = next(iter(answers.items()))
    again = await session.generate(worker, _params(session, recorded))
    return _same(title, alone.get(title), again, "asked a second time")


async def _together(
    session: Session, worker: Worker, answers: Mapping[str, Any], alone: Mapping[str, Answer]
) -> dict[str, CaseResult | None]:
    """All answers at once, and a few of them twice: ragged prompts, shared steps, prefill in chunks."""
    asked = [*answers.items(), *list(answers.items())[:2]]
    made = await asyncio.gather(
        *(session.generate(worker, _params(session, recorded)) for _, recorded in asked),
        return_exceptions=True,
    )
    results: dict[str, CaseResult | None] = {}
    for (title, _), answer in zip(asked, made, strict=True):
        if isinstance(answer, asyncio.CancelledError):
            raise answer
        if isinstance(answer, BaseException):
            results[title] = failed(f"{type(answer).__name__}: {answer}")
        elif results.get(title) is None:
            results[title] = _same(title, alone.get(title), answer, "in company")
    return results


async def _narrow(
    session: Session,
    worker: Worker,
    name: str,
    answers: Mapping[str, Any],
    alone: Mapping[str, Answer],
) -> CaseResult | None:
    """Another worker, with one thread and room for two: who waits for whom changes nothing."""
    await session.load(worker, name, threads=1, max_sequences=2)
    made = await _together(session, worker, answers, alone)
    return next((result for result in made.values() if result is not None), None)


def _params(session: Session, recorded: Mapping[str, Any]) -> m.GenerateParams:
    params = m.GenerateParams.model_validate(recorded["params"])
    return params if session.is_canonical else params.model_copy(update={"logprobs": None})


def _same(title: str, alone: Answer | None, found: Answer, how: str) -> CaseResult | None:
    if alone is None:
        return failed(f"{title} gave no answer when it was asked alone")
    result = grade_rows(alone.as_rows(), found.as_rows(), group="generation", case=f"{title} {how}")
    return result if result.is_failed else None
