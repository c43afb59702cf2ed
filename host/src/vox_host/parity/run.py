"""Ask one side after the other, each in a worker of its own, and follow a difference to its operator."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from vox_host.conformance.compare import first_difference
from vox_host.counted import counted
from vox_host.errors import PluginError, WorkerFailedError
from vox_host.execution import describe_lane, execution_of
from vox_host.hardware.system import System
from vox_host.launch import plan_launch
from vox_host.models.installed import InstalledModel
from vox_host.parity.compare import Answered, Parting, SideResult
from vox_host.parity.requests import Asked
from vox_host.parity.sides import Side
from vox_host.resolution import Candidate, named_plugin
from vox_host.settings import Settings
from vox_host.workers import Limits, Worker
from vox_plugin_api import messages as m
from vox_plugin_api.transcript import Transcript

__all__ = ["Job", "ask_side", "check_options", "find_candidate", "loaded", "locate", "require_capabilities"]

_MAX_SEQUENCES = 64
"""What a worker is asked to provide for where fewer requests come together: the protocol's default."""
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What does not differ between the sides."""

    settings: Settings
    model: InstalledModel
    asked: Sequence[Asked]
    threads: int | None = None
    context_length: int | None = None
    at_once: int = 1
    """Requests that are begun together, so that a worker makes their tokens in the same steps."""
    kv_cache_bytes: int | None = None
    """Memory that a worker may use for keys and values; None: its own bound."""
    say: Callable[[str], None] = lambda _: None
    check: Callable[[m.LoadResult], None] = lambda _: None
    """Told of what a side loaded before it is asked anything; raises where that can't be compared."""


def require_capabilities(candidates: Sequence[Candidate], capabilities: Sequence[m.Capability]) -> None:
    """Refuse plugins that can't do what will be asked, before any of them is started.

    Raises:
        PluginError: a plugin's manifest lacks one of `capabilities`.
    """
    for candidate in candidates:
        manifest = candidate.manifest
        offered = manifest.backend.capabilities if manifest else ()
        missing = [capability for capability in capabilities if capability not in offered]
        if missing:
            needed_by = "--train-steps" if missing == ["train"] else "parity"
            raise PluginError(
                "capability-missing",
                f'plugin "{candidate.plugin_id}" has no capability '
                f"{' and '.join(map(repr, missing))}, which {needed_by} needs; nothing was started",
                facts=[("capabilities", ", ".join(offered) or "none")],
                remedy="`vox-host plugin list` shows what each plugin can do.",
            )


async def check_options(job: Job, sides: Sequence[tuple[Side, Candidate]]) -> None:
    """Load the model on each side that has options of its lane, before the first of them answers anything.

    Raises:
        VoxError: an option isn't one, or the side can't be used.
    """
    for side, candidate in sides:
        if side.lane_options:
            async with loaded(job, side, candidate, None):
                pass


async def ask_side(job: Job, side: Side, candidate: Candidate) -> SideResult:
    """Return all answers of one side.

    Raises:
        VoxError: the plugin can't be started, can't load the model, or fails a request.
    """
    job.say(f"{side.label}: {counted(len(job.asked), 'request')}")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="vox-parity-") as folder:
        path = Path(folder) / "transcript"
        with Transcript(path) as transcript:
            async with loaded(job, side, candidate, transcript) as (worker, load, facts):
                job.check(load)
                answers = [answer for group in _groups(job) for answer in await _ask(worker, group)]
        recorded = path.read_bytes()
    return SideResult(
        label=side.label,
        plugin=candidate.plugin_id,
        plugin_version=candidate.version or "",
        plugin_tree_digest=candidate.receipt.tree_digest if candidate.receipt else None,
        lane=describe_lane(candidate.lane or "-", execution_of(candidate.execution, facts)),
        lane_options=side.lane_options,
        numerics=load.numerics,
        numerics_version=load.numerics_version,
        answers=tuple(answers),
        transcript=recorded,
        transcript_sha256=hashlib.sha256(recorded).hexdigest(),
        observation={"seconds": round(time.monotonic() - started, 1), "load": facts},
    )


@contextlib.asynccontextmanager
async def loaded(
    job: Job, side: Side, candidate: Candidate, transcript: Transcript | None
) -> AsyncGenerator[tuple[Worker, m.LoadResult, object], None]:
    """Start a side's worker and load the model as the side says; nothing of it is left afterwards."""
    settings = job.settings
    plan = await asyncio.to_thread(
        plan_launch, candidate, plugins_dir=settings.plugins_dir, log_dir=settings.log_dir
    )
    worker = await Worker.start(plan, Limits(), transcript)
    try:
        offered = candidate.manifest.backend.numerics if candidate.manifest else []
        params = m.LoadModelParams(
            model_dir=str(job.model.path),
            model_digest=job.model.digest,
            context_length=job.context_length,
            numerics="canonical" if "canonical" in offered or not offered else offered[0],
            threads=job.threads,
            memory_bytes=job.kv_cache_bytes,
            max_sequences=max(job.at_once, _MAX_SEQUENCES),
            lane_options=dict(side.lane_options),
        )
        event = await worker.call("load_model", params)
        yield worker, m.LoadResult.model_validate(event.result), event.observation
    finally:
        await worker.stop()


def _groups(job: Job) -> Iterator[Sequence[Asked]]:
    for first in range(0, len(job.asked), job.at_once):
        yield job.asked[first : first + job.at_once]


async def _ask(worker: Worker, group: Sequence[Asked]) -> list[Answered]:
    """Score all prompts of the group, then continue them: begun in order, none waited for before the next."""
    scores = await _together(_score(worker, asked) for asked in group)
    answers = await _together(_continue(worker, asked) for asked in group)
    return [
        Answered(asked.number, logits_digest, tokens, answer)
        for asked, logits_digest, (tokens, answer) in zip(group, scores, answers, strict=True)
    ]


async def _together(asking: Iterable[Coroutine[Any, Any, _T]]) -> list[_T]:
    """Begin all in their order; the first that fails ends the others."""
    begun = [asyncio.create_task(one) for one in asking]
    try:
        return await asyncio.gather(*begun)
    finally:
        for task in begun:
            task.cancel()
        await asyncio.gather(*begun, return_exceptions=True)


async def _score(worker: Worker, asked: Asked) -> str:
    scored = m.EvaluateResult.model_validate((await worker.call("evaluate", asked.evaluate)).result)
    if scored.logits_digest is None:
        raise WorkerFailedError("incomplete-answer", "the worker gave no digest of its logits")
    return scored.logits_digest


async def _continue(worker: Worker, asked: Asked) -> tuple[tuple[int, ...], str]:
    tokens: list[int] = []
    digest = hashlib.sha256()
    async with contextlib.aclosing(worker.stream("generate", asked.generate)) as events:
        async for event in events:
            if event.result is not None:
                digest.update(m.canonical_json(event.result) + b"\n")
                result = m.GenerateResult.model_validate(event.result)
                tokens += [token.token_id for token in result.tokens]
    return tuple(tokens), digest.hexdigest()


async def locate(
    job: Job,
    parting: Parting,
    first: tuple[Side, Candidate],
    other: tuple[Side, Candidate],
    answer: Sequence[int],
) -> Parting:
    """Trace the request in which two sides part, and name the first operator that differs.

    Args:
        answer: the first side's tokens; those before the parting are part of the trace.
    """
    for _, candidate in (first, other):
        if candidate.manifest is None or "trace" not in candidate.manifest.backend.capabilities:
            return parting
    asked = next(one for one in job.asked if one.number == parting.request)
    kept = (
        answer if parting.position is None and parting.what == "answer" else answer[: parting.position or 0]
    )
    tokens = [*asked.token_ids, *kept]
    job.say(f"tracing request {parting.request} on both sides ({counted(len(tokens), 'token')})")
    params = m.TraceParams(token_ids=tokens)
    traces = []
    for side, candidate in (first, other):
        async with loaded(job, side, candidate, None) as (worker, _, _):
            event = await worker.call("trace", params)
            traces.append(m.TraceResult.model_validate(event.result).operators)
    for a, b in zip(*traces, strict=False):
        if a != b:
            return await _element(job, parting, first, other, tokens, a)
    return parting


async def _element(
    job: Job,
    parting: Parting,
    first: tuple[Side, Candidate],
    other: tuple[Side, Candidate],
    tokens: list[int],
    operator: m.OperatorDigest,
) -> Parting:
    payloads = []
    for side, candidate in (first, other):
        async with loaded(job, side, candidate, None) as (worker, _, _):
            event = await worker.call("trace", m.TraceParams(token_ids=tokens, slices=[operator.name]))
            payloads.append(event.payloads[0])
    found = first_difference(
        payloads[0], payloads[1], dtype="f32", shape=operator.shape, operator=operator.operator
    )
    named = replace(parting, operator=operator.operator, name=operator.name)
    if found is None:
        return named
    return replace(named, element=found.element, expected=found.expected, found=found.found)


def find_candidate(candidates: Sequence[Candidate], plugin: str) -> Candidate:
    """Return the plugin called `plugin`.

    Raises:
        NoCandidateError: there is none, or there can be none here.
    """
    return named_plugin(candidates, plugin, System().os)
