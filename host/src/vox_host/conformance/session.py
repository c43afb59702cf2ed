"""What a group is given: workers of the plugin under test, the tiny models, and its time limit."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from vox_host.conformance.compare import Difference
from vox_host.conformance.tiny_models import TINY_MODELS, TinyModel, write_model
from vox_host.conformance.verdict import CaseResult, Verdict
from vox_host.errors import VoxError
from vox_host.integrity import verify_installation
from vox_host.launch import plan_launch
from vox_host.resolution import Candidate
from vox_host.settings import Settings
from vox_host.workers import LaunchPlan, Limits, Worker
from vox_plugin_api import messages as m

__all__ = ["Answer", "NotOfferedError", "Session", "Target"]

START_S = 45.0
"""The longest a start may take, imports and self-test: milliseconds of work, and the loading of libraries."""
REQUEST_S = 180.0
"""The longest any one request of the suite may take; it is tiny, so this is a hang."""


class NotOfferedError(Exception):
    """The plugin lacks what a group is about; the text is the reason that is shown."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What is checked, and with which settings."""

    settings: Settings
    candidate: Candidate
    lane_options: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    numerics: m.Numerics | None = None
    """None: canonical where the plugin has it."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer to `generate`."""

    tokens: tuple[m.GeneratedToken, ...]
    finish_reason: str | None

    def as_rows(self) -> list[list[Any]]:
        """Return token, logprob bits and the likeliest ones' bits, one row per token."""
        return [
            [
                token.token_id,
                None if token.logprob is None else m.f32_bits(token.logprob),
                [[t.token_id, m.f32_bits(t.logprob)] for t in token.top],
            ]
            for token in self.tokens
        ]


class Session:
    """One check: starts workers, each from bytes verified anew, and asks them."""

    def __init__(self, target: Target, folder: Path, say: Callable[[str], None]) -> None:
        """Nothing is started; the tiny models are written into `folder` as they are needed."""
        self.target = target
        self.say = say
        self.self_test_failure: VoxError | None = None
        """Why the lane serves nothing, once that is known."""
        self.start_failure: VoxError | None = None
        """Why no worker starts, once that is known."""
        self.lane_facts: dict[str, Any] = {}
        """What the lane said of itself when it loaded a model last."""
        self.folder = folder
        self._plan: LaunchPlan | None = None
        self._models: dict[str, tuple[Path, str]] = {}

    # --- what the plugin offers ------------------------------------------------------------

    @property
    def numerics(self) -> m.Numerics:
        """What is asked for: the target's own, else canonical where the plugin has it."""
        if self.target.numerics is not None:
            return self.target.numerics
        manifest = self.target.candidate.manifest
        offered: Sequence[m.Numerics] = manifest.backend.numerics if manifest else ("canonical",)
        return "canonical" if "canonical" in offered else offered[0]

    @property
    def is_canonical(self) -> bool:
        return self.numerics == "canonical"

    def require(self, capability: m.Capability) -> None:
        """Raise `NotOfferedError` unless the plugin's manifest has `capability`."""
        assert capability in get_args(m.Capability)
        manifest = self.target.candidate.manifest
        if manifest is None or capability not in manifest.backend.capabilities:
            raise NotOfferedError(f"the plugin has no capability {capability!r}")

    # --- workers ---------------------------------------------------------------------------

    async def plan(self, purpose: Literal["serve", "check"] = "serve") -> LaunchPlan:
        """Return a plan that starts the plugin, its bytes verified.

        Raises:
            IntegrityError: they are not what was installed.
        """
        settings, candidate = self.target.settings, self.target.candidate
        if self._plan is None:
            self._plan = await asyncio.to_thread(
                plan_launch, candidate, plugins_dir=settings.plugins_dir, log_dir=settings.log_dir
            )
        elif candidate.receipt is not None:
            await asyncio.to_thread(verify_installation, candidate.receipt, settings.plugins_dir)
        return replace(self._plan, purpose=purpose)

    @contextlib.asynccontextmanager
    async def worker(
        self, purpose: Literal["serve", "check"] = "serve", *, limits: Limits | None = None
    ) -> AsyncGenerator[Worker, None]:
        """Start a worker; nothing of it is left afterwards."""
        worker = await Worker.start(await self.plan(purpose), limits or Limits(handshake_timeout_s=START_S))
        try:
            yield worker
        finally:
            await worker.stop()

    def model(self, name: str) -> tuple[TinyModel, Path, str]:
        """Return a tiny model, its folder and its digest."""
        model = next(model for model in TINY_MODELS if model.name == name)
        if name not in self._models:
            path = self.folder / name
            self._models[name] = (path, write_model(model, path))
        return (model, *self._models[name])

    async def load(self, worker: Worker, name: str, **changes: Any) -> m.LoadResult:
        """Load a tiny model."""
        _, path, digest = self.model(name)
        params = m.LoadModelParams(
            model_dir=str(path),
            model_digest=digest,
            numerics=self.numerics,
            threads=self.target.threads,
            lane_options=dict(self.target.lane_options),
        ).model_copy(update=changes)
        event = await in_time(worker.call("load_model", params))
        said = (event.observation or {}).get("lane")
        if isinstance(said, dict):
            self.lane_facts = said
        return m.LoadResult.model_validate(event.result)

    async def generate(self, worker: Worker, params: m.GenerateParams) -> Answer:
        """Return a whole answer."""
        tokens: list[m.GeneratedToken] = []
        reason: str | None = None

        async def collect() -> None:
            nonlocal reason
            async with contextlib.aclosing(worker.stream("generate", params)) as events:
                async for event in events:
                    if event.result is not None:
                        result = m.GenerateResult.model_validate(event.result)
                        tokens.extend(result.tokens)
                        reason = result.finish_reason or reason

        await in_time(collect())
        return Answer(tuple(tokens), reason)


async def in_time(work: Awaitable[Any], limit_s: float = REQUEST_S) -> Any:
    """Await `work`; past the limit it is a `TimeoutError`."""
    async with asyncio.timeout(limit_s):
        return await work


async def case(name: str, work: Awaitable[CaseResult | None], passed: Verdict | None = None) -> CaseResult:
    """Run one case: an error of the worker, or no answer in time, is its failure.

    `work` returns None when it passed, which earns the grade `passed`.
    """
    started = time.monotonic()
    try:
        result = await work
    except NotOfferedError as reason:
        return CaseResult(name=name, is_skipped=True, detail=str(reason))
    except VoxError as error:
        # Which file it was is the whole point of an integrity error; others carry a worker's log.
        facts = "".join(f"; {key} {value}" for key, value in error.facts if error.exit_code == 4)
        return CaseResult(name=name, grade="failed", detail=f"{error.code}: {error.message}{facts}")
    except TimeoutError:
        waited = time.monotonic() - started
        detail = f"no answer within {waited:.0f} s"
        return CaseResult(name=name, grade="failed", detail=detail, is_hang=True)
    return CaseResult(name=name, grade=passed) if result is None else replace(result, name=name)


def failed(detail: str, difference: Difference | None = None) -> CaseResult:
    """Return a failure; `case` gives it its name."""
    return CaseResult(name="", grade="failed", detail=detail, difference=difference)
