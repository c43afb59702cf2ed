import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from vox_host.errors import UsageError, WorkerFailedError
from vox_host.workers.connection import Connection
from vox_plugin_api import messages as m
from vox_plugin_api.framing import (
    MAX_JSON_BYTES,
    FrameDecoder,
    decode_to_worker,
    encode_frame,
    encode_message,
    encode_token,
)

TRACE = m.TraceParams(token_ids=[1])


class Peer:
    """The worker's end: plain asynchronous reads and writes of messages."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._decoder = FrameDecoder()
        self._frames: list = []

    async def receive(self):
        while not self._frames:
            data = await asyncio.get_running_loop().sock_recv(self.socket, 65536)
            self._frames = self._decoder.feed(data)
        return decode_to_worker(self._frames.pop(0))

    async def send(self, *messages: m.Message) -> None:
        await self.raw(b"".join(encode_message(message) for message in messages))

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.socket, data)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Connection, Peer]]:
    ours, theirs = socket.socketpair()
    connection = await Connection.open(ours)
    with theirs:
        yield connection, Peer(theirs)
        await connection.close()


def event(request_id: int, number: int, *, final: bool = False, slices: int = 0) -> m.Event:
    return m.Event(id=request_id, final=final, result={"n": number}, slices=slices)


async def numbers(connection: Connection) -> list[int]:
    return [answer.result["n"] async for answer in connection.stream("trace", TRACE)]


async def test_interleaved_answers_reach_their_own_requests_in_order(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    tasks = [asyncio.create_task(numbers(connection)) for _ in range(3)]
    ids = [(await peer.receive()).id for _ in tasks]
    assert len(set(ids)) == 3
    for step in range(3):
        for place, request_id in enumerate(ids):
            await peer.send(event(request_id, 10 * place + step, final=step == 2))
    assert await asyncio.gather(*tasks) == [[0, 1, 2], [10, 11, 12], [20, 21, 22]]


async def test_binary_frames_arrive_with_their_event(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    events = connection.stream("trace", TRACE)
    waiting = asyncio.create_task(anext(events))
    request_id = (await peer.receive()).id
    data = encode_message(event(request_id, 1, final=True, slices=2))
    data += encode_frame("B", b"one") + encode_frame("B", b"")
    await peer.raw(data[:-3])
    await asyncio.sleep(0.02)
    assert not waiting.done()
    await peer.raw(data[-3:])
    assert (await waiting).payloads == (b"one", b"")
    await events.aclose()


async def test_a_message_where_binary_was_announced_is_a_breach(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    task = asyncio.create_task(numbers(connection))
    request_id = (await peer.receive()).id
    await peer.send(event(request_id, 1, slices=1), event(request_id, 2))
    breach = await connection.closed
    assert breach is not None
    assert "expected 1 binary frames" in breach.message
    task.cancel()


async def test_leaving_a_stream_cancels_the_request_and_late_events_are_dropped(
    pair: tuple[Connection, Peer],
) -> None:
    connection, peer = pair
    async with aclosing(connection.stream("trace", TRACE)) as events:
        waiting = asyncio.create_task(anext(events))
        request_id = (await peer.receive()).id
        await peer.send(event(request_id, 1))
        await waiting
    assert await peer.receive() == m.Cancel(id=request_id)
    await peer.send(
        event(request_id, 2), m.Failed(id=request_id, error=m.WorkerError(code="cancelled", message=""))
    )
    task = asyncio.create_task(numbers(connection))
    await peer.send(event((await peer.receive()).id, 5, final=True))
    assert await task == [5]


async def test_a_cancelled_waiter_cancels_the_request(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    task = asyncio.create_task(numbers(connection))
    request_id = (await peer.receive()).id
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await peer.receive() == m.Cancel(id=request_id)


async def test_a_complete_answer_is_not_cancelled_afterwards(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    for _ in range(2):
        task = asyncio.create_task(numbers(connection))
        request = await peer.receive()
        assert isinstance(request, m.Request)
        await peer.send(event(request.id, 0, final=True))
        assert await task == [0]


async def test_an_error_of_the_worker_keeps_code_facts_and_remedy(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    task = asyncio.create_task(numbers(connection))
    request_id = (await peer.receive()).id
    error = m.WorkerError(code="too-long", message="no room", facts={"limit": 5}, remedy="ask for less")
    await peer.send(m.Failed(id=request_id, error=error))
    with pytest.raises(WorkerFailedError) as caught:
        await task
    assert caught.value.as_dict() == {
        "code": "too-long",
        "message": "no room",
        "facts": {"limit": 5},
        "remedy": "ask for less",
    }


@pytest.mark.parametrize(
    ("data", "mentions"),
    [
        (b"Traceback (most recent call last)", "Traceback"),
        (b"J\xff\xff\xff\xff", "declares 4294967295"),
        (encode_message(m.Shutdown()), "shutdown"),
        (encode_message(event(1, 0)), "request 1, which was never made"),
        (encode_message(event(0, 0)), "request 0, which was never made"),
        (encode_frame("B", b"x"), "expected a message"),
    ],
)
async def test_a_breach_closes_the_connection_and_says_what_was_found(
    pair: tuple[Connection, Peer], data: bytes, mentions: str
) -> None:
    connection, peer = pair
    await peer.raw(data)
    breach = await connection.closed
    assert breach is not None
    assert mentions in breach.message


async def test_the_end_of_the_stream_inside_a_frame_is_a_breach(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    await peer.raw(b"J\0\0")
    peer.socket.close()
    breach = await connection.closed
    assert breach is not None
    assert breach.code == "frame-truncated"


async def test_the_plain_end_of_the_stream_is_none(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    peer.socket.close()
    assert await connection.closed is None


async def test_after_a_failure_every_request_gets_it(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    task = asyncio.create_task(numbers(connection))
    await peer.receive()
    error = WorkerFailedError("worker-died", "gone")
    connection.fail(error)
    for pending in (task, numbers(connection)):
        with pytest.raises(WorkerFailedError) as caught:
            await pending
        assert caught.value is error


async def test_progress_and_idleness_move_the_pulse_and_mere_life_does_not(
    pair: tuple[Connection, Peer],
) -> None:
    connection, peer = pair

    async def moved_by(beat: m.Heartbeat) -> tuple[bool, bool]:
        heard, moved = connection.pulse.heard_s, connection.pulse.moved_s
        await peer.send(beat)
        while connection.pulse.heard_s == heard:
            await asyncio.sleep(0.001)
        return True, connection.pulse.moved_s > moved

    assert await moved_by(m.Heartbeat(state="busy", progress=5)) == (True, True)
    assert await moved_by(m.Heartbeat(state="busy", progress=5)) == (True, False)
    assert await moved_by(m.Heartbeat(state="busy", progress=6)) == (True, True)
    assert await moved_by(m.Heartbeat(state="idle", progress=6)) == (True, True)


async def test_a_request_over_the_limit_is_the_callers_error_and_harms_nobody(
    pair: tuple[Connection, Peer],
) -> None:
    connection, peer = pair
    params = m.TraceParams(token_ids=[1], slices=["x" * MAX_JSON_BYTES])
    with pytest.raises(UsageError) as caught:
        await anext(connection.stream("trace", params))
    assert caught.value.code == "request-too-large"
    task = asyncio.create_task(numbers(connection))
    await peer.send(event((await peer.receive()).id, 1, final=True))
    assert await task == [1]


async def test_a_plain_token_arrives_as_any_event_does(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    events = connection.stream("trace", TRACE)
    waiting = asyncio.create_task(anext(events))
    request_id = (await peer.receive()).id
    connection.pulse.heard_s = connection.pulse.moved_s = 0.0
    await peer.raw(encode_token(request_id, 9))
    found = await waiting
    whole = m.Event(
        id=request_id,
        final=False,
        result=m.GenerateResult(tokens=[m.GeneratedToken(token_id=9)]).model_dump(mode="json"),
    )
    assert (found.id, found.final, found.result) == (whole.id, whole.final, whole.result)
    assert (found.observation, found.slices, found.payloads) == (None, 0, ())
    assert connection.pulse.heard_s == connection.pulse.moved_s > 0, "the worker has finished something"
    await events.aclose()


async def test_a_plain_token_of_a_request_never_made_is_a_breach(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    await peer.raw(encode_token(5, 9))
    breach = await connection.closed
    assert breach is not None and "request 5" in breach.message


async def test_a_plain_token_in_place_of_a_binary_frame_is_a_breach(pair: tuple[Connection, Peer]) -> None:
    connection, peer = pair
    events = connection.stream("trace", TRACE)
    waiting = asyncio.create_task(anext(events))
    request_id = (await peer.receive()).id
    await peer.raw(encode_message(event(request_id, 1, slices=1)) + encode_token(request_id, 9))
    breach = await connection.closed
    assert breach is not None and breach.message.startswith("expected 1 binary frames")
    waiting.cancel()
