from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from vox_host.app.service import ModelService
from vox_host.server.admission import Admission
from vox_host.server.heap import HeapKeeper
from vox_host.server.http_app import HTTP_OPTIONS, make_http_app
from vox_host.server.security import Access


@pytest.fixture
async def serving() -> AsyncIterator[Callable]:
    """Start a live server on loopback for a service; returns a client of it."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(
            service: ModelService,
            *,
            api_key: str | None = None,
            checks_host: bool = True,
            admission: Admission | None = None,
            heap: HeapKeeper | None = None,
        ) -> TestClient:
            app: web.Application = make_http_app(
                service, access=Access(api_key, checks_host), admission=admission, heap=heap
            )
            server = TestServer(app)
            await server.start_server(**HTTP_OPTIONS)
            client = TestClient(server)
            stack.push_async_callback(client.close)
            if service._template is not None:
                stack.callback(service._template.close)
            return client

        yield start
