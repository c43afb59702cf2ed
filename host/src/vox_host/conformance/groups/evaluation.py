"""Scores of given texts: every token's logprob and the digest of all logits."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from vox_host.conformance.compare import Difference
from vox_host.conformance.expected import load_models
from vox_host.conformance.grading import grade_rows
from vox_host.conformance.session import Answer, Session, case, failed, in_time
from vox_host.conformance.verdict import CaseResult
from vox_host.workers import Worker
from vox_plugin_api import messages as m

__all__ = ["ask_scores", "judge_scores", "run"]


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield one result per tiny model and text.

    Raises:
        NotOfferedError: the plugin does not evaluate.
    """
    session.require("evaluate")
    index, _ = load_models()
    for name, model in index["models"].items():
        async with session.worker() as worker:
            found: list[m.EvaluateResult] = []
            asked = await case(f"{name}/request", _evaluate(session, worker, name, model, found))
            yield asked
            if asked.is_failed:
                continue
            for number, (recorded, result) in enumerate(zip(model["scores"]["results"], found, strict=True)):
                title = f"{name}/text {number}"
                yield await case(title, judge_scores(session, model, title, recorded, result))


async def _evaluate(
    session: Session, worker: Worker, name: str, model: Mapping[str, Any], found: list[m.EvaluateResult]
) -> CaseResult | None:
    await session.load(worker, name)
    return await ask_scores(worker, model, found)


async def ask_scores(
    worker: Worker, model: Mapping[str, Any], found: list[m.EvaluateResult]
) -> CaseResult | None:
    """Have the model's texts scored; the results go to `found`."""
    sequences = model["scores"]["sequences"]
    params = m.EvaluateParams(sequences=sequences, top_logprobs=2, logits_digest=True)

    async def collect() -> None:
        async with contextlib.aclosing(worker.stream("evaluate", params)) as events:
            results = [event.result async for event in events if event.result is not None]
        found.extend(m.EvaluateResult.model_validate(result) for result in results)

    await in_time(collect())
    if [result.index for result in found] != list(range(len(sequences))):
        return failed(f"expected results 0 to {len(sequences) - 1}, found {[r.index for r in found]}")
    return None


async def judge_scores(
    session: Session,
    model: Mapping[str, Any],
    title: str,
    recorded: Mapping[str, Any],
    result: m.EvaluateResult,
    *,
    group: str = "evaluate",
) -> CaseResult | None:
    """Compare the scores of one text with what was recorded."""
    rows = Answer(tuple(result.tokens), None).as_rows()
    tolerance = None if session.is_canonical else m.f32_from_bits(model["tolerance"])
    graded = grade_rows(recorded["rows"], rows, group=group, case=title, tolerance=tolerance)
    if graded.is_failed or not session.is_canonical:
        return graded
    if result.logits_digest != recorded["logits_digest"]:
        difference = Difference(
            group=group,
            case=title,
            operator="logits",
            name="digest",
            expected=recorded["logits_digest"],
            found=str(result.logits_digest),
        )
        return failed(str(difference), difference)
    return graded
