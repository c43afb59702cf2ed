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
from vox_host.server.admission import Admission
from vox_host.server.api_error import ApiError, api_error_of, internal_error

__all__ = ["EXCHANGE", "REQUEST_ID", "Exchange", "dumps", "json_response", "stream_events"]

REQUEST_ID = web.RequestKey("request_id", str)
KEEPALIVE_S = 5.0
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
            # A header holds Latin-1 and no line break; the JSON has the text as it is.
            headers["x-vox-degraded"] = " ".join(info.degraded.split()).encode("ascii", "replace").decode()
        if seed is not None:
            headers["x-vox-seed"] = str(seed)
        return headers


EXCHANGE: web.AppKey[Exchange] = web.AppKey("exchange", Exchange)


def dumps(value: object) -> str:
    """Return strict JSON: never NaN or Infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
    async with contextlib.aclosing(events):
        upcoming: asyncio.Task[dict[str, Any] | None] | None = None
        try:
            while True:
                upcoming = upcoming or asyncio.create_task(_next(events))
                await asyncio.wait([upcoming], timeout=KEEPALIVE_S)
                if not upcoming.done():
                    await _prepare(request, response)
                    await response.write(b": keepalive\n\n")
                    continue
                event = upcoming.result()
                upcoming = None
                await _prepare(request, response)
                if event is None:
                    await response.write(b"data: [DONE]\n\n")
                    break
                await response.write(f"data: {dumps(event)}\n\n".encode())
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as problem:  # noqa: BLE001 -- any failure must reach the client as an event
            error = error_of(problem)
            if not response.prepared:
                raise error from None
            await response.write(f"data: {dumps(error.body())}\n\n".encode())
        finally:
            if upcoming is not None:
                upcoming.cancel()
                await asyncio.gather(upcoming, return_exceptions=True)
    with contextlib.suppress(ConnectionError):
        await response.write_eof()
    return response


async def _next(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(events, None)


async def _prepare(request: web.Request, response: web.StreamResponse) -> None:
    if not response.prepared:
        await response.prepare(request)
