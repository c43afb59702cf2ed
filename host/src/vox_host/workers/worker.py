"""One worker: a process and its connection, from the handshake to the end of both.

A worker has one life. `ended` is done, with the error to show, the moment the worker can serve
no more: it died, broke the protocol, fell silent or stalled. Starting another is the
supervisor's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable
from importlib import metadata
from typing import Any

from vox_host.errors import IntegrityError, PluginError, VoxError, WorkerFailedError
from vox_host.workers import failures
from vox_host.workers.connection import Connection, Event
from vox_host.workers.launch import LaunchPlan, Limits
from vox_host.workers.process import WorkerProcess
from vox_plugin_api import messages as m
from vox_plugin_api.framing import ProtocolError
from vox_plugin_api.transcript import Transcript

__all__ = ["Worker"]

_MONITOR_INTERVAL_S = 0.5


class Worker:
    """A worker that has shaken hands. Make one with `start`."""

    def __init__(
        self,
        plan: LaunchPlan,
        limits: Limits,
        process: WorkerProcess,
        connection: Connection,
        transcript: Transcript | None,
    ) -> None:
        self.ended: asyncio.Future[VoxError] = asyncio.get_running_loop().create_future()
        self._plan = plan
        self._limits = limits
        self._process = process
        self._connection = connection
        self._transcript = transcript
        self._hello: m.WorkerHello | None = None
        self._monitor = asyncio.create_task(self._watch())

    @classmethod
    async def start(
        cls,
        plan: LaunchPlan,
        limits: Limits,
        transcript: Transcript | None = None,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> Worker:
        """Start the process and shake hands. What it is asked and answers goes to `transcript`.

        Args:
            meanwhile: called once the process runs; the worker takes some tenths of a second to answer.

        Raises:
            PluginError: the plugin is not for this host (protocol, manifest).
            IntegrityError: its manifest is not the one that was verified.
            WorkerFailedError: it died, hung, failed its self-test, or said something else.
        """
        try:
            process = WorkerProcess.start(plan)
        except OSError as error:
            raise failures.not_started(plan, error) from error
        try:
            connection = await Connection.open(process.connection)
        except BaseException:
            process.kill()
            process.connection.close()
            raise
        worker = cls(plan, limits, process, connection, transcript)
        try:
            if meanwhile is not None:
                meanwhile()
            await worker._shake_hands()
        except BaseException:
            worker._process.kill()
            await worker._leave()
            raise
        return worker

    @property
    def hello(self) -> m.WorkerHello:
        """What the worker said of itself."""
        assert self._hello is not None
        return self._hello

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log_problem(self) -> str | None:
        """Why it writes to the host's stderr in place of a log file; None: it doesn't."""
        return self._process.log.problem

    @property
    def resident_bytes(self) -> int | None:
        """Its memory at the last heartbeat."""
        return self._connection.pulse.resident_bytes

    async def stream(self, method: m.Method, params: m.Message) -> AsyncGenerator[Event, None]:
        """Yield the events of one request; closing the iterator early cancels it.

        Raises:
            WorkerFailedError: the worker answered with an error, or did not answer to the end.
        """
        exchange = self._transcript.begin(method, params) if self._transcript else None
        failure: str | None = "cancelled"
        try:
            async with contextlib.aclosing(self._connection.stream(method, params)) as events:
                async for event in events:
                    if exchange is not None:
                        exchange.event(event.result, event.payloads)
                    if event.final:
                        failure = None
                    yield event
        except VoxError as error:
            failure = error.code
            raise
        finally:
            if exchange is not None:
                exchange.end(failure)

    async def call(self, method: m.Method, params: m.Message) -> Event:
        """Return the last event of one request.

        Raises:
            WorkerFailedError: the worker answered with an error, or did not answer to the end.
        """
        async with contextlib.aclosing(self.stream(method, params)) as events:
            async for event in events:
                if event.final:
                    return event
        raise AssertionError("unreachable: a stream ends with a final event or an error")

    async def stop(self) -> None:
        """Ask the worker to finish; insist when it does not. Requests in flight are cancelled.

        Raises:
            WorkerFailedError: not even SIGKILL ended it.
        """
        self._connection.fail(
            WorkerFailedError("worker-stopped", f'worker "{self._plan.plugin_id}" was stopped')
        )
        self._connection.send(m.Shutdown())
        await self._process.end(self._limits)
        await self._leave()

    async def _leave(self) -> None:
        await asyncio.wait([self._process.exited], timeout=self._limits.kill_timeout_s)
        self._monitor.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._monitor
        await self._connection.close()
        if not self._process.exited.done():
            raise failures.not_ended(self._plan, self._process)

    # --- handshake -------------------------------------------------------------------------

    async def _shake_hands(self) -> None:
        nonce = secrets.token_hex(16)
        ours = m.ProtocolRange(min=m.PROTOCOL_MIN, max=m.PROTOCOL_MAX)
        self._connection.send(
            m.HostHello(
                protocol=ours,
                host_version=_host_version(),
                plugin_id=self._plan.plugin_id,
                manifest_digest=self._plan.manifest_digest,
                nonce=nonce,
                purpose=self._plan.purpose,
            )
        )
        answered = self._connection.hello
        either: list[asyncio.Future[Any]] = [answered, self.ended]
        await asyncio.wait(
            either,
            timeout=self._limits.handshake_timeout_s,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if not answered.done():
            if self.ended.done():
                raise self.ended.result()
            limit = f"{self._limits.handshake_timeout_s:g} s"
            stage = self._process.log.stage()
            doing = f": after {limit} it was still {stage}" if stage else ""
            raise self._kill(
                "handshake-timeout",
                f"did not complete its handshake in time{doing}",
                [("limit", limit), *([("stage", stage)] if stage else [])],
                remedy=failures.start_remedy(self._plan, stage),
            )
        hello = answered.result()
        if isinstance(hello, m.Refused):
            raise failures.refused(self._plan, self._process, hello.error)
        self._check(hello, ours, nonce)
        self._hello = hello

    def _check(self, hello: m.WorkerHello, ours: m.ProtocolRange, nonce: str) -> None:
        plan = self._plan
        if ours.highest_common(hello.protocol) is None:
            raise PluginError(
                "protocol-mismatch",
                f'plugin "{plan.plugin_id}" speaks protocol {hello.protocol.min} to {hello.protocol.max}, '
                f"this host {ours.min} to {ours.max}; it was not used",
                facts=[
                    ("plugin protocol", f"{hello.protocol.min} to {hello.protocol.max}"),
                    ("host protocol", f"{ours.min} to {ours.max}"),
                ],
                remedy="Install versions of vox-host and the plugin that share a protocol.",
            )
        pairs = [
            ("magic", m.MAGIC, hello.magic),
            ("plugin", plan.plugin_id, hello.plugin_id),
            ("version", plan.plugin_version, hello.plugin_version),
            ("manifest", f"sha256:{plan.manifest_digest}", f"sha256:{hello.manifest_digest}"),
            ("nonce", nonce, hello.nonce),
        ]
        for name, expected, found in pairs:
            if expected != found:
                raise IntegrityError(
                    "wrong-worker",
                    f'worker "{plan.plugin_id}" states another {name} than was verified; it was not used',
                    facts=[("expected", expected), ("found", found)],
                    remedy=f"Run `vox-host plugin verify {plan.plugin_id}`.",
                )

    # --- the end ---------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Wait for whatever ends this worker first, and say what it was."""
        closed, exited = self._connection.closed, self._process.exited
        either: list[asyncio.Future[Any]] = [closed, exited]
        while not closed.done() and not exited.done():
            await asyncio.wait(either, timeout=_MONITOR_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            if not closed.done() and not exited.done() and (error := self._silence()) is not None:
                self._end(error)
                return
        if closed.done() and (breach := closed.result()) is not None:
            self._end(self._breach(breach))
            return
        # The kernel closes a dying process's descriptors a moment before it can be waited for;
        # how it ended is worth that moment.
        await asyncio.wait([exited], timeout=self._limits.connection_timeout_s)
        if exited.done():
            # What it managed to say before its end is still to be read.
            await asyncio.wait([closed], timeout=self._limits.connection_timeout_s)
            doing, stage = "while it was in use", None
            if self._hello is None:
                stage = self._process.log.stage()
                doing = f"before its handshake, while {stage}" if stage else "before its handshake"
            self._end(failures.worker_died(self._plan, self._process, exited.result(), doing, stage))
        else:
            self._end(self._kill("connection-closed", "closed its connection and went on running", []))

    def _silence(self) -> WorkerFailedError | None:
        if self._hello is None:  # the handshake has a limit of its own
            return None
        now, pulse, limits = time.monotonic(), self._connection.pulse, self._limits
        if now - pulse.heard_s > limits.heartbeat_timeout_s:
            return self._kill(
                "worker-silent",
                f"gave no sign of life for {now - pulse.heard_s:.1f} s",
                [("limit", f"{limits.heartbeat_timeout_s} s")],
            )
        if now - pulse.moved_s > limits.stall_timeout_s:
            return self._kill(
                "worker-stalled",
                f"was busy for {now - pulse.moved_s:.1f} s without finishing anything",
                [("limit", f"{limits.stall_timeout_s} s"), ("progress", pulse.progress)],
            )
        return None

    def _breach(self, breach: ProtocolError) -> WorkerFailedError:
        return self._kill(
            "protocol-error",
            f"broke the protocol: {breach.message}",
            [("breach", breach.code), *breach.facts.items()],
        )

    def _kill(
        self, code: str, why: str, facts: list[tuple[str, object]], remedy: str | None = None
    ) -> WorkerFailedError:
        self._process.kill()
        return failures.worker_killed(self._plan, self._process, code, why, facts, remedy)

    def _end(self, error: VoxError) -> None:
        self._connection.fail(error)
        if not self.ended.done():
            self.ended.set_result(error)


def _host_version() -> str:
    try:
        return metadata.version("vox-host")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "unknown"
