"""Keep one worker of a plugin serving: start it, start it again when it ends, give up in time.

A request is never replayed. Those in flight when a worker ends get its error at once; those
that come while another is being started wait for it, no longer than the limits say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Literal

from vox_host.errors import IntegrityError, PluginError, VoxError, WorkerFailedError
from vox_host.workers import failures
from vox_host.workers.connection import Event
from vox_host.workers.launch import LaunchPlan, Limits
from vox_host.workers.worker import Worker
from vox_plugin_api import messages as m
from vox_plugin_api.transcript import Transcript

__all__ = ["Phase", "Supervisor", "WorkerState"]

log = logging.getLogger(__name__)

Phase = Literal["starting", "ready", "restarting", "failed", "stopped"]


@dataclass(frozen=True, slots=True)
class WorkerState:
    """What a health check shows."""

    phase: Phase
    pid: int | None = None
    restarts: int = 0
    """Since the supervisor was started."""
    last_error: VoxError | None = None
    """Why the last worker ended, if one did."""
    given_up: WorkerFailedError | None = None
    """Why no other is started, and what to do; only of a worker that had served."""


class Supervisor:
    """One plugin's worker, kept alive."""

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        renew: Callable[[], Awaitable[LaunchPlan]] | None = None,
        prepare: Callable[[Worker], Awaitable[None]] | None = None,
        meanwhile: Callable[[], None] | None = None,
        on_state: Callable[[WorkerState], None] | None = None,
        transcript: Transcript | None = None,
        limits: Limits | None = None,
    ) -> None:
        """Nothing starts yet.

        `prepare` makes a fresh worker ready (it loads the model) and runs again after each restart.
        `meanwhile` is called while a fresh process gets up, before its handshake.
        `renew` gives the plan of each restart, its bytes verified again; without it `plan` is used
        again. `on_state` hears of every change of state.
        """
        self._plan = plan
        self._renew = renew
        self._prepare = prepare
        self._meanwhile = meanwhile
        self._on_state = on_state
        self._transcript = transcript
        self._limits = limits or Limits()
        self._state = WorkerState("stopped")
        self._changed = asyncio.Event()
        self._worker: Worker | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def state(self) -> WorkerState:
        """The state now."""
        return self._state

    async def start(self) -> m.WorkerHello:
        """Start the worker and prepare it. A first start that fails is not tried again.

        Raises:
            VoxError: why it can't serve; nothing is left running.
        """
        if self._state.phase in ("starting", "ready", "restarting"):
            raise WorkerFailedError(
                "worker-running", f'worker "{self._plan.plugin_id}" is running already; nothing was started'
            )
        self._set("starting", pid=None, restarts=0, last_error=None, given_up=None)
        try:
            worker = await self._start_worker()
        except VoxError as error:
            self._set("failed", pid=None, last_error=error)
            raise
        except BaseException:
            self._set("stopped", pid=None)
            raise
        self._keeper = asyncio.create_task(self._keep(worker))
        return worker.hello

    async def call(self, method: m.Method, params: m.Message) -> Event:
        """Return the last event of one request.

        Raises:
            WorkerFailedError: the worker's own error, or how it ended.
        """
        worker = await self._ready_worker()
        return await worker.call(method, params)

    async def stream(self, method: m.Method, params: m.Message) -> AsyncGenerator[Event, None]:
        """Yield the events of one request; closing the iterator early cancels it.

        Raises:
            WorkerFailedError: the worker's own error, or how it ended.
        """
        worker = await self._ready_worker()
        async with contextlib.aclosing(worker.stream(method, params)) as events:
            async for event in events:
                yield event

    async def stop(self) -> None:
        """Stop the worker; nothing of it is left when this returns. Stopping twice does nothing."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        worker, self._worker = self._worker, None
        if worker is not None:
            await worker.stop()
        self._set("stopped", pid=None)

    # --- keeping ---------------------------------------------------------------------------

    async def _start_worker(self) -> Worker:
        worker = await Worker.start(self._plan, self._limits, self._transcript, meanwhile=self._meanwhile)
        try:
            if self._prepare is not None:
                await self._prepare(worker)
        except BaseException:
            await worker.stop()
            raise
        self._worker = worker
        self._set("ready", pid=worker.pid)
        return worker

    async def _keep(self, worker: Worker) -> None:
        try:
            await self._replace_each(worker)
        except Exception:
            # Our own mistake, or one of `prepare`: nobody may wait for a worker that never comes.
            log.exception("worker %s: starting another one failed unexpectedly", self._plan.plugin_id)
            self._give_up(failures.not_restarted(self._plan, None))
            raise

    async def _replace_each(self, worker: Worker) -> None:
        """Start a new worker when one ends, until too many in a row have."""
        in_a_row = ended = 0
        row_began_s = 0.0
        while True:
            began_s = time.monotonic()
            error = await asyncio.shield(worker.ended)
            self._worker = None
            if time.monotonic() - began_s > self._limits.healthy_after_s:
                in_a_row = ended = 0
            if ended == 0:
                row_began_s = time.monotonic()
            ended += 1
            self._set("restarting", pid=None, last_error=error)
            _log_end(error)
            try:
                await worker.stop()
            except VoxError as failure:
                # Two workers at once could hold twice the memory.
                self._give_up(failures.not_restarted(self._plan, failure), last_error=failure)
                return
            while True:
                if in_a_row >= self._limits.max_restarts:
                    within_s = time.monotonic() - row_began_s
                    last = self._state.last_error or error
                    self._give_up(failures.ended_too_often(self._plan, ended, within_s, last))
                    return
                await asyncio.sleep(self._limits.backoff_s * 2**in_a_row)
                in_a_row += 1
                self._set("restarting", restarts=self._state.restarts + 1)
                try:
                    if self._renew is not None and not await self._renewed(self._renew):
                        return
                    worker = await self._start_worker()
                    break
                except (IntegrityError, PluginError) as failure:
                    # Another attempt would find the same bytes.
                    self._give_up(failures.not_restarted(self._plan, failure), last_error=failure)
                    return
                except VoxError as failure:
                    ended += 1
                    self._set("restarting", last_error=failure)
                    _log_end(failure)

    async def _renewed(self, renew: Callable[[], Awaitable[LaunchPlan]]) -> bool:
        """Take a fresh plan. A model or a plugin that is gone or changed stays so: that is final."""
        try:
            self._plan = await renew()
        except VoxError as failure:
            self._give_up(failures.not_restarted(self._plan, failure), last_error=failure)
            return False
        return True

    def _give_up(self, why: WorkerFailedError, **changes: object) -> None:
        facts = "; ".join(f"{name}: {value}" for name, value in why.facts)
        log.error("%s. %s (%s)", why.message, why.remedy, facts)
        self._set("failed", pid=None, given_up=why, **changes)

    async def _ready_worker(self) -> Worker:
        deadline_s = time.monotonic() + self._limits.ready_timeout_s
        while self._is_changing():
            changed = self._changed
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await changed.wait()
            except TimeoutError:
                raise self._unavailable(
                    "worker-not-ready", f"was not ready within {self._limits.ready_timeout_s} s"
                ) from None
        if self._worker is None:
            given_up = self._state.given_up
            if given_up is not None:
                raise WorkerFailedError(
                    given_up.code,
                    f"{given_up.message}; the request was not sent",
                    facts=[("restarts", self._state.restarts), *given_up.facts],
                    remedy=given_up.remedy,
                )
            if self._state.phase == "failed":
                raise self._unavailable("worker-failed", "could not be started")
            raise self._unavailable("worker-stopped", "is not running")
        return self._worker

    def _is_changing(self) -> bool:
        # A worker may have ended a moment before its keeper has been told.
        return self._state.phase in ("starting", "restarting") or (
            self._worker is not None and self._worker.ended.done()
        )

    def _unavailable(self, code: str, why: str) -> WorkerFailedError:
        last = self._state.last_error
        facts = [] if last is None else [("last error", f"{last.code}: {last.message}"), *last.facts]
        return WorkerFailedError(
            code,
            f'worker "{self._plan.plugin_id}" {why}; the request was not sent',
            facts=[("restarts", self._state.restarts), *facts],
            remedy=last.remedy if last is not None else None,
        )

    def _set(self, phase: Phase, **changes: object) -> None:
        self._state = replace(self._state, phase=phase, **changes)  # type: ignore[arg-type]
        self._changed.set()
        self._changed = asyncio.Event()
        if self._on_state is not None:
            self._on_state(self._state)


def _log_end(error: VoxError) -> None:
    facts = dict(error.facts)
    log.info("%s (exit: %s; log: %s)", error.message, facts.get("exit", "-"), facts.get("log", "-"))
