"""The aiohttp application: routes, and the one middleware every request passes."""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from vox_host.app.service import ContextOverflowError, ModelService
from vox_host.server import info
from vox_host.server.admission import Admission
from vox_host.server.api_error import ApiError
from vox_host.server.body import MAX_BODY_BYTES
from vox_host.server.chat_completion import handle_chat_completion
from vox_host.server.completion import handle_completion
from vox_host.server.exchange import EXCHANGE, REQUEST_ID, Exchange, error_of, json_response
from vox_host.server.generate import handle_generate
from vox_host.server.heap import HeapKeeper
from vox_host.server.security import Access, cors_headers

__all__ = ["HTTP_OPTIONS", "make_http_app"]

# `server.encoding` inflates bodies, within the limit.
HTTP_OPTIONS: dict[str, Any] = {"auto_decompress": False}
"""What whoever runs the application must pass to its runner."""

_REQUEST_ID_FORM = re.compile(r"[A-Za-z0-9._:-]{1,128}")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_http_app(
    service: ModelService,
    *,
    access: Access,
    admission: Admission | None = None,
    heap: HeapKeeper | None = None,
) -> web.Application:
    """Return the application that serves `service`."""
    heap = heap or HeapKeeper()
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_middleware(access, heap)])
    app[EXCHANGE] = Exchange(service, admission or Admission())
    app.on_response_prepare.append(_add_headers)

    async def close_heap(_: web.Application) -> None:
        await heap.close()

    app.on_cleanup.append(close_heap)
    add, add_get = app.router.add_route, app.router.add_get
    for path in ("/health", "/v1/health"):
        add_get(path, info.handle_health)  # and HEAD, which load balancers send
    add_get("/v1/models", info.handle_models)
    add_get("/v1/models/{model:.+}", info.handle_model)
    add_get("/v1/backends", info.handle_backends)
    for path in ("/generate", "/v1/generate"):
        add("POST", path, handle_generate)
    add("POST", "/v1/completions", handle_completion)
    add("POST", "/v1/chat/completions", handle_chat_completion)
    return app


def _middleware(access: Access, heap: HeapKeeper) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        request[REQUEST_ID] = given if _REQUEST_ID_FORM.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        try:
            access.check(request.method, request.path, request.headers)
            if request.method == "OPTIONS":
                return web.Response(status=200)
            return await handler(request)
        except web.HTTPException as problem:
            return _error_response(_routing_error(request, problem))
        except Exception as problem:
            if isinstance(problem, ConnectionError):
                raise
            error = error_of(problem)
            if isinstance(problem, ContextOverflowError):
                error.param = "messages" if request.path.endswith("/chat/completions") else "prompt"
            return _error_response(error)
        finally:
            heap.after_request(request.content.total_bytes, is_encoded="Content-Encoding" in request.headers)

    return guard


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Runs for every response, streams included."""
    response.headers["x-request-id"] = request.get(REQUEST_ID, "")
    response.headers["X-Content-Type-Options"] = "nosniff"
    response.headers.pop("Server", None)
    for name, value in cors_headers(request.headers.get("Origin")).items():
        response.headers[name] = value


def _routing_error(request: web.Request, problem: web.HTTPException) -> ApiError:
    if isinstance(problem, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(problem.allowed_methods))
        return ApiError(
            405,
            f"{request.method[:20]} is not a method of {request.path[:200]}; it takes {allowed}",
            code="method_not_allowed",
            headers={"Allow": allowed},
        )
    if problem.status == 404:
        return ApiError(404, f"there is no {request.path[:200]} here", code="unknown_path")
    return ApiError(problem.status, problem.reason or "the request could not be read", code="bad_request")


def _error_response(error: ApiError) -> web.Response:
    return json_response(error.body(), status=error.status, headers=error.headers)
