"""Frames: how one message, or the bytes of one tensor, lies on the private descriptor.

A frame is a kind byte (`J` canonical JSON, `B` bytes), the payload's length as four
big-endian bytes, and the payload. `FrameDecoder` is pure and serves both sides; `FrameChannel`
is the blocking reader and writer of a worker. Anything else on the stream is a breach of the
protocol, told as a `ProtocolError` that shows the first bytes found: text printed by mistake is
recognised at sight.
"""

from __future__ import annotations

import os
import re
import struct
import threading
from collections.abc import Iterable
from functools import cache
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, TypeAdapter, ValidationError

from vox_plugin_api import messages as m

__all__ = [
    "MAX_BINARY_BYTES",
    "MAX_JSON_BYTES",
    "Frame",
    "FrameChannel",
    "FrameDecoder",
    "ProtocolError",
    "decode_to_host",
    "decode_token",
    "decode_to_worker",
    "encode_frame",
    "encode_message",
    "encode_token",
]

MAX_JSON_BYTES = 64 * 2**20
MAX_BINARY_BYTES = 2**30

_HEADER = struct.Struct(">cI")
_LIMITS = {b"J": MAX_JSON_BYTES, b"B": MAX_BINARY_BYTES}
_J = ord("J")
_SHOWN_BYTES = 64
_READ_BYTES = 256 * 1024

FrameKind = Literal["J", "B"]
AnyToWorker = m.HostHello | m.Request | m.Cancel | m.Shutdown
AnyToHost = m.WorkerHello | m.Event | m.Failed | m.Heartbeat | m.Refused


class ProtocolError(Exception):
    """The other side sent something that is not protocol 1; nothing after it can be trusted."""

    def __init__(self, code: str, message: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.facts = facts or {}


class Frame(NamedTuple):
    """One frame as it lay on the stream."""

    kind: FrameKind
    payload: bytes


def encode_frame(kind: FrameKind, payload: bytes) -> bytes:
    """Return the bytes of one frame.

    Raises:
        ProtocolError: the payload is over the limit of its kind; nothing was sent.
    """
    limit = _LIMITS[kind.encode("ascii")]
    if len(payload) > limit:
        raise ProtocolError(
            "frame-too-large",
            f"a frame of kind {kind} may hold {limit} bytes; this one has {len(payload)} and was not sent",
            {"kind": kind, "limit": limit, "found": len(payload)},
        )
    return _HEADER.pack(kind.encode("ascii"), len(payload)) + payload


def encode_message(message: BaseModel) -> bytes:
    """Return `message` as the bytes of one JSON frame."""
    return encode_frame("J", m.canonical_json(message))


def encode_token(request_id: int, token_id: int) -> bytes:
    """Return `encode_message` of the event that adds one token to an answer, and says nothing more.

    Nearly all that a worker sends are such events. Their bytes differ in two numbers, which are put into
    a pattern: a tenth of the time that writing each of them out takes.
    """
    before, between, after = _token_pattern()
    return encode_frame("J", b"%b%d%b%d%b" % (before, request_id, between, token_id, after))


@cache
def _token_pattern() -> tuple[bytes, bytes, bytes]:
    """What stands before, between and after the two numbers."""
    request_id, token_id = 10**9 + 1, 10**9 + 2
    result = m.GenerateResult(tokens=[m.GeneratedToken(token_id=token_id)])
    written = m.canonical_json(m.Event(id=request_id, final=False, result=result.model_dump(mode="json")))
    before, rest = written.split(b"%d" % request_id)
    between, after = rest.split(b"%d" % token_id)
    return before, between, after


class FrameDecoder:
    """Cuts a byte stream into frames, however it was split on the way."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Take the next bytes of the stream; return the frames they complete.

        Raises:
            ProtocolError: no frame starts here, or it declares more than its kind may hold.
                It is raised from the header alone, before anything of that size is kept.
        """
        self._buffer += data
        frames: list[Frame] = []
        start = 0
        size = len(self._buffer)
        while size > start:
            length = self._payload_length(start)
            if length is None or size - start - _HEADER.size < length:
                break
            body = start + _HEADER.size
            kind: FrameKind = "J" if self._buffer[start] == _J else "B"
            frames.append(Frame(kind, bytes(self._buffer[body : body + length])))
            start = body + length
        del self._buffer[:start]
        return frames

    def finish(self) -> None:
        """State that the stream has ended.

        Raises:
            ProtocolError: it ended inside a frame.
        """
        if self._buffer:
            raise ProtocolError(
                "frame-truncated",
                f"the stream ended inside a frame, {len(self._buffer)} bytes after its start",
                _shown(bytes(self._buffer)),
            )

    def _payload_length(self, start: int) -> int | None:
        kind = self._buffer[start : start + 1]
        limit = MAX_JSON_BYTES if kind == b"J" else _LIMITS.get(bytes(kind))
        if limit is None:
            found = bytes(self._buffer[start : start + _SHOWN_BYTES])
            raise ProtocolError(
                "bad-frame", f"expected a frame of kind J or B, found {found[:16]!r}", _shown(found)
            )
        if len(self._buffer) - start < _HEADER.size:
            return None
        length: int = _HEADER.unpack_from(self._buffer, start)[1]
        if length > limit:
            found = bytes(self._buffer[start : start + _SHOWN_BYTES])
            raise ProtocolError(
                "frame-too-large",
                f"a frame of kind {kind.decode()} may hold {limit} bytes; this one declares {length}",
                {"limit": limit, "found": length, **_shown(found)},
            )
        return length


class FrameChannel:
    """Blocking frames on one descriptor. One thread reads; any thread may write."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._decoder = FrameDecoder()
        self._ready: list[Frame] = []
        self._write_lock = threading.Lock()

    def read(self) -> Frame | None:
        """Return the next frame, or None when the other side has closed.

        Raises:
            ProtocolError: what came is not a frame.
        """
        while not self._ready:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except ConnectionError:
                data = b""
            if not data:
                self._decoder.finish()
                return None
            self._ready = self._decoder.feed(data)
        return self._ready.pop(0)

    def send(self, message: BaseModel, slices: Iterable[bytes] = ()) -> None:
        """Write `message`, then one binary frame per slice, with nothing of another thread between.

        Raises:
            ProtocolError: a frame is over its limit; nothing was written.
            OSError: the other side has gone.
        """
        self.write(encode_message(message) + b"".join(encode_frame("B", piece) for piece in slices))

    def write(self, data: bytes) -> None:
        """Write whole frames, with nothing of another thread between.

        Raises:
            OSError: the other side has gone.
        """
        with self._write_lock:
            view = memoryview(data)
            while view:
                view = view[os.write(self._fd, view) :]


def decode_token(frame: Frame) -> tuple[int, int] | None:
    """Return request and token where a frame is what `encode_token` makes of them; None: any other frame.

    Validating each took a fifth of the host's time for a token: by the next one, the model's weights have
    driven the code for it out of the caches.
    """
    found = _token_form().fullmatch(frame.payload) if frame.kind == "J" else None
    return None if found is None else (int(found[1]), int(found[2]))


@cache
def _token_form() -> re.Pattern[bytes]:
    number = rb"(0|[1-9][0-9]{0,15})"
    return re.compile(number.join(map(re.escape, _token_pattern())))


def decode_to_worker(frame: Frame) -> AnyToWorker:
    """Parse a frame from the host.

    Raises:
        ProtocolError: it is no message a host sends.
    """
    message: AnyToWorker = _decode(frame, _to_worker())
    return message


def decode_to_host(frame: Frame) -> AnyToHost:
    """Parse a frame from a worker.

    Raises:
        ProtocolError: it is no message a worker sends.
    """
    message: AnyToHost = _decode(frame, _to_host())
    return message


def _decode(frame: Frame, adapter: TypeAdapter[Any]) -> Any:
    if frame.kind != "J":
        raise ProtocolError(
            "bad-message",
            f"expected a message, found {len(frame.payload)} bytes of binary",
            _shown(frame.payload),
        )
    try:
        return adapter.validate_json(frame.payload)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        raise ProtocolError(
            "bad-message",
            f"not a message of protocol {m.PROTOCOL_MAX}: {where or 'payload'}: {problem['msg']}",
            {"path": where, **_shown(frame.payload)},
        ) from None


@cache
def _to_worker() -> TypeAdapter[Any]:
    return TypeAdapter(m.ToWorker)


@cache
def _to_host() -> TypeAdapter[Any]:
    return TypeAdapter(m.ToHost)


def _shown(data: bytes) -> dict[str, Any]:
    first = data[:_SHOWN_BYTES]
    return {"first_bytes": first.hex(" "), "as_text": first.decode("utf-8", "backslashreplace")}
