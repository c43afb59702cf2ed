"""What every generating handler needs: the parts, common headers, JSON and event-stream writing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vox_host.app.service import ModelService
from vox_host.errors import VoxError
from vox_host.printable import printable
from vox_host.server.admission import Admission
from vox_host.server.api_error import ApiError, api_error_of, internal_error

__all__ = ["EXCHANGE", "REQUEST_ID", "Exchange", "dumps", "json_response", "stream_events"]

REQUEST_ID = web.RequestKey("request_id", str)
KEEPALIVE_S = 5.0
_HEADER_LETTERS = 1000
_log = logging.getLogger("vox_host.server")


@dataclass(frozen=True, slots=True)
class Exchange:
    """What handlers are given."""

    service: ModelService
    admission: Admission

    def headers(self, seed: int | None = None) -> dict[str, str]:
        """Return the headers that say what made the answer."""
        info = self.service.info
        headers = {"x-vox-plugin": info.plugin_id, "x-vox-lane": info.lane, "x-vox-numerics": info.numerics}
        if info.degraded is not None:
            headers["x-vox-degraded"] = _header_text(info.degraded)
        if seed is not None:
            headers["x-vox-seed"] = str(seed)
        return headers


EXCHANGE: web.AppKey[Exchange] = web.AppKey("exchange", Exchange)


def _header_text(text: str) -> str:
    """Return a text as a header can hold it, and every client takes it; the JSON has it as it is.

    The words are often a plugin's: a header with a control character is refused by aiohttp, and then there
    is no answer at all.
    """
    plain = printable(" ".join(text.split())).encode("ascii", "replace").decode()
    return plain if len(plain) <= _HEADER_LETTERS else f"{plain[: _HEADER_LETTERS - 4]} ..."


def dumps(value: object) -> str:
    """Return strict JSON: never NaN or Infinity."""
    return _STRICT.encode(value)


_STRICT = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""Made once: `json.dumps` makes one for each value."""


def json_response(body: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a JSON response."""
    return web.Response(
        body=dumps(body).encode("utf-8"), status=status, headers=headers, content_type="application/json"
    )


def error_of(problem: BaseException) -> ApiError:
    """Return any failure as an ApiError; what nobody raised on purpose is logged."""
    if isinstance(problem, ApiError):
        return problem
    if isinstance(problem, VoxError):
        _log.warning("answer failed: %s: %s", problem.code, problem.message)
        return api_error_of(problem)
    _log.error("unexpected failure while answering", exc_info=problem)
    return internal_error()


async def stream_events(
    request: web.Request,
    events: AsyncGenerator[dict[str, Any], None],
    *,
    headers: dict[str, str],
) -> web.StreamResponse:
    """Send `events` as server-sent events, then [DONE].

    A failure before the first event is an ordinary error response. One after it is sent as an
    `error` event that ends the stream, without [DONE]. While nothing comes, comments keep the
    connection open.
    """
    response = web.StreamResponse(
        headers={
            **headers,
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
    )
    stream = _EventStream(request, response)
    keeper = asyncio.create_task(stream.keep_open())
    async with contextlib.aclosing(events):
        try:
            async for event in events:
                await stream.write(f"data: {dumps(event)}\n\n".encode())
            await stream.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as problem:  # noqa: BLE001 -- any failure must reach the client as an event
            error = error_of(problem)
            if not response.prepared:
                raise error from None
            await stream.write(f"data: {dumps(error.body())}\n\n".encode())
        finally:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
    with contextlib.suppress(ConnectionError):
        await response.write_eof()
    return response


class _EventStream:
    """A response that two write to, one at a time: its events, and comments while none comes."""

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        self._request = request
        self._response = response
        self._writing = asyncio.Lock()
        self._written_s = asyncio.get_running_loop().time()
        """When something was written last."""

    async def write(self, data: bytes) -> None:
        """Write whole events; the response begins with the first of them."""
        async with self._writing:
            if not self._response.prepared:
                await self._response.prepare(self._request)
            await self._response.write(data)
            self._written_s = asyncio.get_running_loop().time()

    async def keep_open(self) -> None:
        """Write a comment whenever nothing else was written for a while, until cancelled."""
        # A task of its own, woken every few seconds: to wait for each event with a limit takes longer than
        # all else that is done for it.
        while True:
            waited_s = asyncio.get_running_loop().time() - self._written_s
            if waited_s < KEEPALIVE_S:
                await asyncio.sleep(KEEPALIVE_S - waited_s)
            else:
                await self.write(b": keepalive\n\n")
