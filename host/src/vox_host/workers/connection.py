"""One connection to a worker: many requests at once, their events sorted out again.

Bytes to messages to whoever asked. It knows nothing of processes: when the stream ends or
breaks, `closed` says so, and `Worker` decides what that means.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

from vox_host.errors import UsageError, VoxError
from vox_host.workers import failures
from vox_plugin_api import messages as m
from vox_plugin_api.framing import (
    AnyToHost,
    Frame,
    FrameDecoder,
    ProtocolError,
    decode_to_host,
    decode_token,
    encode_message,
)

__all__ = ["Connection", "Event", "Pulse"]


@dataclass(slots=True)
class Event:
    """An event as the host hands it on: with the binary frames that came after it.

    Plain fields, not frozen, since one is made for every token and was checked as `messages.Event` before.
    """

    id: int
    final: bool
    result: dict[str, Any] | None
    observation: dict[str, Any] | None
    slices: int
    """How many binary frames belong to it."""
    payloads: tuple[bytes, ...] = ()


@dataclass(slots=True)
class Pulse:
    """What is known of a worker's life, in seconds of the monotonic clock."""

    heard_s: float
    """When anything at all came last."""
    moved_s: float
    """When it was last idle or had done more than before."""
    state: str = "idle"
    progress: int = 0
    resident_bytes: int | None = None

    def heard(self, message: AnyToHost) -> None:
        """Take note of `message`."""
        if not isinstance(message, m.Heartbeat):
            self.heard_work()
            return
        now = time.monotonic()
        self.heard_s = now
        if message.state == "idle" or message.progress != self.progress:
            self.moved_s = now
        self.state = message.state
        self.progress = message.progress
        self.resident_bytes = message.resident_bytes

    def heard_work(self) -> None:
        """Take note of something that was finished."""
        self.heard_s = self.moved_s = time.monotonic()


class _Answers:
    """What came for one request and nobody has taken; one task takes it."""

    def __init__(self) -> None:
        self._come: deque[Event | m.WorkerError | VoxError] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, answer: Event | m.WorkerError | VoxError) -> None:
        """Add one, and wake who waits."""
        self._come.append(answer)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> Event | m.WorkerError | VoxError:
        """Return the next one, once it is there."""
        while not self._come:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._come.popleft()


class Connection(asyncio.Protocol):
    """The host's end of the private descriptor.

    The event loop calls `data_received`: a task that reads would be woken for every step of the worker, and
    wake who waits for the tokens one turn of the loop later.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self.pulse = Pulse(heard_s=now, moved_s=now)
        self.closed: asyncio.Future[ProtocolError | None] = asyncio.get_running_loop().create_future()
        """Done when nothing more will come: None for a plain end, or the breach that was found."""
        self.hello: asyncio.Future[m.WorkerHello | m.Refused] = asyncio.get_running_loop().create_future()
        """Done when the worker has answered the handshake."""
        self._transport: asyncio.Transport | None = None
        self._waiting: Event | None = None
        """An event some of whose binary frames are still to come."""
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the descriptor was given back."""
        self._is_left = False
        self._decoder = FrameDecoder()
        self._answers: dict[int, _Answers] = {}
        self._last_id = 0
        self._failure: VoxError | None = None

    @classmethod
    async def open(cls, connection: socket.socket) -> Connection:
        """Take over a connected socket."""
        _, made = await asyncio.get_running_loop().create_unix_connection(cls, sock=connection)
        return made

    def send(self, message: m.Message) -> None:
        """Queue `message` for the worker; after the end of the connection it goes nowhere."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode_message(message))

    async def stream(self, method: m.Method, params: m.Message) -> AsyncGenerator[Event, None]:
        """Yield the events of one request. Closing the iterator early cancels the request.

        Raises:
            WorkerFailedError: the worker answered with an error, or did not answer to the end.
        """
        if self._failure is not None:
            raise self._failure
        self._last_id += 1
        request_id = self._last_id
        answers = _Answers()
        self._answers[request_id] = answers
        try:
            self._ask(m.Request(id=request_id, method=method, params=params.model_dump(mode="json")))
            while True:
                answer = await answers.take()
                if isinstance(answer, m.WorkerError):
                    raise failures.from_worker_error(answer)
                if isinstance(answer, VoxError):
                    raise answer
                yield answer
                if answer.final:
                    return
        finally:
            # Still there: the worker has not ended it, so the caller has.
            if self._answers.pop(request_id, None) is not None:
                self.send(m.Cancel(id=request_id))

    def _ask(self, request: m.Request) -> None:
        try:
            self.send(request)
        except ProtocolError as error:
            del self._answers[request.id]
            raise UsageError(
                "request-too-large",
                f"a request of method {request.method!r} is too large; it was not sent",
                facts=[
                    ("limit", f"{error.facts['limit']} bytes"),
                    ("found", f"{error.facts['found']} bytes"),
                ],
                remedy="Ask for less at once.",
            ) from None

    def fail(self, error: VoxError) -> None:
        """End all requests in flight, and any that come, with `error`."""
        self._failure = error
        for answers in self._answers.values():
            answers.put(error)
        self._answers.clear()

    async def close(self) -> None:
        """Give the descriptor back."""
        self._is_left = True
        if self._transport is not None:
            self._transport.close()
            await self._lost

    # --- receiving -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """For the event loop."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """For the event loop: hand on what came."""
        if self._is_left or self.closed.done():
            return
        try:
            for frame in self._decoder.feed(data):
                self._waiting = self._take(frame, self._waiting)
        except ProtocolError as error:
            self._end(error)

    def eof_received(self) -> bool:
        """For the event loop: nothing more will come; what is sent still goes out."""
        self._end()
        return True

    def connection_lost(self, _: Exception | None) -> None:
        """For the event loop."""
        self._end()
        if not self._lost.done():
            self._lost.set_result(None)

    def _end(self, breach: ProtocolError | None = None) -> None:
        if self._is_left or self.closed.done():
            return
        try:
            if breach is None:
                self._decoder.finish()
        except ProtocolError as error:
            breach = error
        self.closed.set_result(breach)

    def _take(self, frame: Frame, waiting: Event | None) -> Event | None:
        """Handle one frame; return the event that still waits for its binary frames."""
        if waiting is None and (plain := decode_token(frame)) is not None:
            request_id, token_id = plain
            self.pulse.heard_work()
            self._deliver(request_id, Event(request_id, False, _with_token(token_id), None, 0), final=False)
            return None
        if waiting is not None:
            if frame.kind != "B":
                raise ProtocolError(
                    "bad-message",
                    f"expected {waiting.slices} binary frames after an event, found {len(waiting.payloads)}",
                )
            waiting = replace(waiting, payloads=(*waiting.payloads, frame.payload))
        else:
            message = decode_to_host(frame)
            self.pulse.heard(message)
            if not isinstance(message, m.Event):
                self._take_message(message)
                return None
            waiting = Event(message.id, message.final, message.result, message.observation, message.slices)
        if len(waiting.payloads) < waiting.slices:
            return waiting
        self._deliver(waiting.id, waiting, final=waiting.final)
        return None

    def _take_message(self, message: AnyToHost) -> None:
        if isinstance(message, m.Failed):
            self._deliver(message.id, message.error, final=True)
        elif isinstance(message, m.Refused) and self.hello.done():
            raise ProtocolError(message.error.code, f"the worker left: {message.error.message}")
        elif isinstance(message, m.WorkerHello | m.Refused):
            if self.hello.done():
                raise ProtocolError("bad-message", "a second worker_hello after the handshake")
            self.hello.set_result(message)

    def _deliver(self, request_id: int, answer: Event | m.WorkerError, *, final: bool) -> None:
        if not 0 < request_id <= self._last_id:
            raise ProtocolError(
                "bad-message",
                f"an answer to request {request_id}, which was never made",
                {"last request": self._last_id},
            )
        # Absent: the caller has left, and the worker had not heard of it yet.
        answers = self._answers.pop(request_id, None) if final else self._answers.get(request_id)
        if answers is not None:
            answers.put(answer)


def _with_token(token_id: int) -> dict[str, Any]:
    return {**_NOTHING_MORE, "tokens": [{"token_id": token_id, "logprob": None, "top": []}]}


_NOTHING_MORE = m.GenerateResult().model_dump(mode="json")
