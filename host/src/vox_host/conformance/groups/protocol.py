"""Hosts of other versions, and words that this version does not have: understood or refused, never a hang."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from vox_host.conformance.raw_peer import RawPeer, json_frame, raw_peer
from vox_host.conformance.session import Session, case, failed
from vox_host.conformance.verdict import CaseResult
from vox_plugin_api import messages as m
from vox_plugin_api.framing import ProtocolError

__all__ = ["run"]

_EXIT_REFUSED = 3


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield the results."""
    low, high = m.PROTOCOL_MIN, m.PROTOCOL_MAX
    for title, first, last, is_understood in (
        (f"a host of protocol {low - 1} alone", low - 1, low - 1, False),
        (f"a host of protocol {high}", high, high, True),
        (f"a host of protocol {high + 1} alone", high + 1, high + 1, False),
        (f"a host of protocols {low - 1} to {high + 1}", low - 1, high + 1, True),
    ):
        yield await case(title, _greet(session, first, last, is_understood))
    yield await case("fields of a newer minor version", _newer_fields(session))
    yield await case(
        "another plugin's name", _wrong(session, "plugin_id", "some-other-plugin", "wrong-plugin")
    )
    yield await case("another manifest", _wrong(session, "manifest_digest", "0" * 64, "manifest-mismatch"))
    yield await case("a method that does not exist", _unknown_method(session))


async def _greet(session: Session, low: int, high: int, is_understood: bool) -> CaseResult | None:
    async with raw_peer(await session.plan()) as peer:
        answer = await _hello(peer, low, high)
        if isinstance(answer, CaseResult):
            return answer
        if is_understood:
            if not isinstance(answer, m.WorkerHello):
                return failed(f"expected worker_hello, found {_shown(answer)}")
            if answer.protocol.highest_common(m.ProtocolRange(min=low, max=high)) is None:
                return failed(f"it agreed, and speaks {answer.protocol.min} to {answer.protocol.max}")
            return None
        return await _refused(peer, answer, "protocol-mismatch")


async def _newer_fields(session: Session) -> CaseResult | None:
    async with raw_peer(await session.plan()) as peer:
        answer = await _hello(peer, m.PROTOCOL_MIN, m.PROTOCOL_MAX, a_field_of_the_future={"x": [1]})
        if isinstance(answer, CaseResult):
            return answer
        return None if isinstance(answer, m.WorkerHello) else failed(f"found {_shown(answer)}")


async def _wrong(session: Session, field: str, value: str, code: str) -> CaseResult | None:
    async with raw_peer(await session.plan()) as peer:
        answer = await _hello(peer, m.PROTOCOL_MIN, m.PROTOCOL_MAX, **{field: value})
        return answer if isinstance(answer, CaseResult) else await _refused(peer, answer, code)


async def _unknown_method(session: Session) -> CaseResult | None:
    async with raw_peer(await session.plan()) as peer:
        answer = await _hello(peer, m.PROTOCOL_MIN, m.PROTOCOL_MAX)
        if not isinstance(answer, m.WorkerHello):
            return failed(f"expected worker_hello, found {_shown(answer)}")
        for number in (1, 2):
            request: dict[str, Any] = {
                "type": "request",
                "id": number,
                "method": "a_method_of_the_future",
                "params": {},
            }
            await peer.send(json_frame(request))
            reply = await peer.receive()
            if not isinstance(reply, m.Failed) or (reply.id, reply.error.code) != (number, "invalid-request"):
                return failed(f"expected the error invalid-request, found {_shown(reply)}")
    return None


async def _hello(
    peer: RawPeer, low: int, high: int, **changes: object
) -> m.WorkerHello | m.Refused | CaseResult | None:
    try:
        answer = await peer.hello(low, high, **changes)
    except ProtocolError as error:
        return failed(f"what came is no frame: {error.message}")
    if answer is None or isinstance(answer, m.WorkerHello | m.Refused):
        return answer
    return failed(f"expected worker_hello or refused, found {_shown(answer)}")


async def _refused(peer: RawPeer, answer: object, code: str) -> CaseResult | None:
    if not isinstance(answer, m.Refused):
        return failed(f"expected refused with {code}, found {_shown(answer)}")
    if answer.error.code != code:
        return failed(f"expected refused with {code}, found {answer.error.code}: {answer.error.message}")
    end = await peer.ended()
    if end is None or end.status != _EXIT_REFUSED:
        return failed(f"it refused, and then: expected exit status {_EXIT_REFUSED}, found {end or 'no end'}")
    return None


def _shown(message: object) -> str:
    if message is None:
        return "the end of the connection"
    return message.model_dump_json()[:300] if isinstance(message, m.Message) else repr(message)
