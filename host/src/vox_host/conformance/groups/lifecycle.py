"""What may happen to a process: it is killed, it falls silent, it prints, it is sent rubbish.

Of each the host must learn at once and by name, and nobody may wait for ever.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path

from vox_host.conformance.expected import load_models
from vox_host.conformance.raw_peer import raw_peer
from vox_host.conformance.session import NotOfferedError, Session, case, failed, in_time
from vox_host.conformance.verdict import CaseResult
from vox_host.errors import VoxError
from vox_host.workers import Limits, Worker
from vox_plugin_api import messages as m
from vox_plugin_api.framing import ProtocolError, encode_frame

__all__ = ["bad_params", "cancelled", "garbage", "host_gone", "noise", "run"]

_AT_ONCE_S = 10.0
_SILENCE_S = 3.0
_EXIT_HOST_GONE = 10
_EXIT_BREACH = 11
_LONG = 400
"""Tokens: more than a worker has made by the time it is struck."""


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield the results."""
    yield await case("killed in the middle of an answer", _killed(session))
    yield await case("stopped in the middle of an answer", _stopped(session))
    async with session.worker() as worker:
        await _load(session, worker)
        yield await case("an answer is cancelled", cancelled(session, worker))
        yield await case("noise on standard output", noise(session, worker))
        yield await case("parameters out of bounds", bad_params(session, worker))
    for title, data in (
        ("text instead of a frame", b"Hello, I am no frame\n"),
        ("a frame longer than any may be", b"J\xff\xff\xff\xff"),
        ("a frame that is no JSON", encode_frame("J", b"{")),
        ("a message that does not exist", encode_frame("J", b'{"type":"good_morning"}')),
        ("bytes that belong to nothing", encode_frame("B", b"\0" * 16)),
    ):
        yield await case(title, garbage(session, data))
    yield await case("half a frame, and the host is gone", host_gone(session, b"J\0\0\0\x10{"))
    yield await case("the host is gone", host_gone(session, b""))


async def _killed(session: Session) -> CaseResult | None:
    async with session.worker() as worker:
        await _load(session, worker)
        return await _struck(
            session, worker, lambda: os.kill(worker.pid, signal.SIGKILL), "worker-died", _AT_ONCE_S
        )


async def _stopped(session: Session) -> CaseResult | None:
    limits = Limits(heartbeat_timeout_s=_SILENCE_S)
    async with session.worker(limits=limits) as worker:
        await _load(session, worker)
        return await _struck(
            session,
            worker,
            lambda: os.kill(worker.pid, signal.SIGSTOP),
            "worker-silent",
            _SILENCE_S + _AT_ONCE_S,
        )


async def _struck(
    session: Session, worker: Worker, strike: Callable[[], None], code: str, limit_s: float
) -> CaseResult | None:
    """Strike after the first piece of an answer; the caller must get `code`, within the limit."""
    struck_s: float | None = None

    async def read() -> None:
        nonlocal struck_s
        async with contextlib.aclosing(worker.stream("generate", _long(session))) as events:
            async for _ in events:
                if struck_s is None:
                    struck_s = time.monotonic()
                    strike()

    try:
        await in_time(read(), limit_s + 60)
    except VoxError as error:
        waited = time.monotonic() - (struck_s or time.monotonic())
        if error.code != code:
            return failed(f"expected {code}, found {error.code}: {error.message}")
        if waited > limit_s:
            return failed(f"the caller heard of it after {waited:.1f} s, allowed {limit_s:.0f} s")
        return None
    return failed("the answer went on to its end" if struck_s else "there was no answer to strike in")


async def cancelled(session: Session, worker: Worker) -> CaseResult | None:
    """The caller leaves; the next one is served as if nothing had been."""
    params = _short(session)
    before = await session.generate(worker, params)
    async with contextlib.aclosing(worker.stream("generate", _long(session))) as events:
        async for _ in events:
            break
    after = await session.generate(worker, params)
    if before.as_rows() != after.as_rows():
        return failed("an answer is not the same after another one was cancelled")
    return None


async def noise(session: Session, worker: Worker) -> CaseResult | None:
    """Write into the worker's own standard output while it answers."""
    if sys.platform != "linux":
        raise NotOfferedError("another process's standard output can be reached on Linux alone")
    params = _short(session)
    before = await session.generate(worker, params)
    for descriptor in (1, 2):
        path = Path(f"/proc/{worker.pid}/fd/{descriptor}")
        if not path.readlink().is_file():
            return failed(f"descriptor {descriptor} is {path.readlink()}, not the worker's log")
        with path.open("ab") as log:
            log.write(b"J\0\0\0\2{} noise\n")
    after = await session.generate(worker, params)
    if before.as_rows() != after.as_rows():
        return failed("an answer is not the same after something was printed")
    return None


async def bad_params(session: Session, worker: Worker) -> CaseResult | None:
    """Refused by name, and the worker serves on."""
    vocabulary = session.model(_first())[0].vocab_size
    wrong: tuple[tuple[str, m.GenerateParams], ...] = (
        (
            "no tokens",
            m.GenerateParams.model_construct(token_ids=[], max_tokens=1, sampling=m.SamplingParams()),
        ),
        ("a token that does not exist", m.GenerateParams(token_ids=[vocabulary], max_tokens=1)),
        ("more than the context", m.GenerateParams(token_ids=[1], max_tokens=1_000_000)),
    )
    for what, params in wrong:
        try:
            await session.generate(worker, params)
        except VoxError:
            if worker.ended.done():
                return failed(f"{what}: the worker ended")
            continue
        return failed(f"{what}: it was answered")
    await session.generate(worker, _short(session))
    return None


async def garbage(session: Session, data: bytes) -> CaseResult | None:
    """What is no message is refused, and the process ends."""
    async with raw_peer(await session.plan()) as peer:
        answer = await peer.hello(m.PROTOCOL_MIN, m.PROTOCOL_MAX)
        if not isinstance(answer, m.WorkerHello):
            return failed(f"expected worker_hello, found {answer!r}")
        await peer.send(data)
        try:
            reply = await peer.receive()
        except ProtocolError as error:
            return failed(f"it answered with no frame: {error.message}")
        if reply is not None and (not isinstance(reply, m.Refused) or reply.error.code != "protocol-error"):
            return failed(f"expected refused with protocol-error, found {reply.model_dump_json()[:200]}")
        end = await peer.ended()
        if end is None:
            return failed("the process goes on after a breach of the protocol")
        return (
            None
            if end.status == _EXIT_BREACH
            else failed(f"expected exit status {_EXIT_BREACH}, found {end}")
        )


async def host_gone(session: Session, data: bytes) -> CaseResult | None:
    """A worker does not outlive its connection."""
    async with raw_peer(await session.plan()) as peer:
        answer = await peer.hello(m.PROTOCOL_MIN, m.PROTOCOL_MAX)
        if not isinstance(answer, m.WorkerHello):
            return failed(f"expected worker_hello, found {answer!r}")
        await peer.send(data)
        await peer.hang_up()
        end = await peer.ended()
        if end is None:
            return failed("the process goes on without a host")
        if end.status not in (_EXIT_HOST_GONE, _EXIT_BREACH):
            return failed(f"expected exit status {_EXIT_HOST_GONE}, found {end}")
    return None


def _first() -> str:
    return str(next(iter(load_models()[0]["models"])))


def _load(session: Session, worker: Worker) -> Awaitable[m.LoadResult]:
    return session.load(worker, _first())


def _short(session: Session) -> m.GenerateParams:
    return m.GenerateParams(token_ids=[3, 14, 15, 92], max_tokens=8, sampling=m.SamplingParams(temperature=0))


def _long(session: Session) -> m.GenerateParams:
    return m.GenerateParams(
        token_ids=[3, 14, 15, 92], max_tokens=_LONG, sampling=m.SamplingParams(temperature=0)
    )
