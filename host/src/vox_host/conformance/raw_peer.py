"""The host's end of a descriptor without the host's manners: for saying what no host should say."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator
from typing import Any

from vox_host.workers import LaunchPlan
from vox_host.workers.process import Exit, WorkerProcess
from vox_plugin_api import messages as m
from vox_plugin_api.framing import AnyToHost, FrameDecoder, decode_to_host, encode_frame

__all__ = ["RawPeer", "json_frame", "raw_peer"]

START_S = 90.0
"""A start with its imports and self-test."""
ANSWER_S = 15.0
"""An answer after that, or the end; each takes milliseconds."""


class RawPeer:
    """A started worker process, and bytes in both directions."""

    def __init__(
        self,
        plan: LaunchPlan,
        process: WorkerProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self.plan = plan
        self.process = process
        self._reader = reader
        self._writer = writer
        self._decoder = FrameDecoder()
        self._ready: list[AnyToHost] = []

    async def send(self, data: bytes) -> None:
        """Send bytes as they are; a worker that has left does not hear them."""
        with contextlib.suppress(ConnectionError):
            self._writer.write(data)
            await self._writer.drain()

    async def hello(self, low: int, high: int, **changes: object) -> AnyToHost | None:
        """Say hello as a host that speaks protocols `low` to `high`; return the answer."""
        hello = m.HostHello(
            protocol=m.ProtocolRange(min=low, max=high),
            host_version="0",
            plugin_id=self.plan.plugin_id,
            manifest_digest=self.plan.manifest_digest,
            nonce=secrets.token_hex(8),
        )
        message = {**hello.model_dump(mode="json"), **changes}
        await self.send(json_frame(message))
        return await self.receive(START_S)

    async def receive(self, limit_s: float = ANSWER_S) -> AnyToHost | None:
        """Return the next message that is no heartbeat; None: it closed the descriptor.

        Raises:
            TimeoutError: neither came in time.
            ProtocolError: what came is no frame.
        """
        async with asyncio.timeout(limit_s):
            while True:
                while self._ready:
                    message = self._ready.pop(0)
                    if not isinstance(message, m.Heartbeat):
                        return message
                try:
                    data = await self._reader.read(65536)
                except ConnectionError:
                    data = b""
                if not data:
                    return None
                self._ready += [decode_to_host(frame) for frame in self._decoder.feed(data)]

    async def hang_up(self) -> None:
        """Close this end."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()

    async def ended(self) -> Exit | None:
        """Return how the process ended; None: it goes on."""
        done, _ = await asyncio.wait([self.process.exited], timeout=ANSWER_S)
        return self.process.exited.result() if done else None


@contextlib.asynccontextmanager
async def raw_peer(plan: LaunchPlan) -> AsyncGenerator[RawPeer, None]:
    """Start a process; it is gone afterwards."""
    process = WorkerProcess.start(plan)
    try:
        reader, writer = await asyncio.open_unix_connection(sock=process.connection)
        peer = RawPeer(plan, process, reader, writer)
        try:
            yield peer
        finally:
            await peer.hang_up()
    finally:
        process.kill()
        await asyncio.wait([process.exited], timeout=ANSWER_S)


def json_frame(message: dict[str, Any]) -> bytes:
    """Return any JSON object as a frame."""
    return encode_frame("J", m.canonical_json(message))
