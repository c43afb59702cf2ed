"""A supervised worker as the engine of a service."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from vox_host.app.service import EngineEvent, EngineHealth
from vox_host.workers import Supervisor
from vox_plugin_api import messages as m

__all__ = ["WorkerEngine"]


class WorkerEngine:
    """Passes requests to the worker and reads its events."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def health(self) -> EngineHealth:
        """Say whether the worker answers now."""
        state = self._supervisor.state
        error = state.given_up or state.last_error
        detail = None if error is None or state.phase == "ready" else error.message
        if detail is not None and state.given_up is not None:
            detail = f"{detail}. {state.given_up.remedy}"
        return EngineHealth(state.phase == "ready", state.phase, detail)

    async def generate(self, params: m.GenerateParams) -> AsyncGenerator[EngineEvent, None]:
        """Stream an answer; closing the iterator cancels it in the worker."""
        async with contextlib.aclosing(self._supervisor.stream("generate", params)) as events:
            async for event in events:
                if event.result is not None:
                    result = m.GenerateResult.model_validate(event.result)
                    yield EngineEvent(result, _cached_tokens(event.observation, len(params.token_ids)))


def _cached_tokens(observation: Mapping[str, Any] | None, prompt_tokens: int) -> int | None:
    """Return what a worker observed; an observation is checked by nobody before, so it is here."""
    found = (observation or {}).get("cached_tokens")
    return found if type(found) is int and 0 <= found <= prompt_tokens else None
