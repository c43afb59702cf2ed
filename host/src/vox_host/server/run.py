"""Listen, until told to stop; then let answers finish, briefly, and leave."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
from collections.abc import Callable, Iterator

import psutil
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from vox_host.app.service import ModelService
from vox_host.errors import UsageError
from vox_host.server.admission import Admission
from vox_host.server.http_app import HTTP_OPTIONS, make_http_app
from vox_host.server.security import Access, check_binding, is_loopback

__all__ = ["DEFAULT_PORT", "check_port_is_free", "serve"]

DEFAULT_PORT = 11434
GRACE_S = 10.0


async def serve(
    service: ModelService,
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    api_key: str | None = None,
    admission: Admission | None = None,
    when_listening: Callable[[str], None] = lambda _: None,
    stop: asyncio.Event | None = None,
) -> None:
    """Serve until SIGINT, SIGTERM, or `stop`.

    Raises:
        UsageError: the address can't be used; it says who has the port.
    """
    check_binding(host, api_key)
    app = make_http_app(service, access=Access(api_key, checks_host=is_loopback(host)), admission=admission)
    # A client that hangs up cancels its handler, and so its answer.
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        logger=_http_log(),
        shutdown_timeout=GRACE_S,
        **HTTP_OPTIONS,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as problem:
            raise _listen_error(host, port, problem) from None
        when_listening(f"http://{_shown(host)}:{_bound_port(runner, port)}")
        stop = stop or asyncio.Event()
        with _stop_signals(stop):
            await stop.wait()
    finally:
        await runner.cleanup()


def _http_log() -> logging.Logger:
    """The HTTP library's log, in which a client's malformed request is one line and no traceback."""

    def shorten(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.exc_info = None
            record.msg, record.args = "malformed HTTP request refused: %s", (error.message.splitlines()[0],)
            record.levelno, record.levelname = logging.INFO, "INFO"
            return logging.getLogger().isEnabledFor(logging.INFO)
        return True

    log = logging.getLogger("vox_host.server.http")
    log.addFilter(shorten)
    return log


def check_port_is_free(host: str, port: int) -> None:
    """Find out early, before a model is loaded for nothing.

    Raises:
        UsageError: it is taken.
    """
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as problem:
            raise _listen_error(host, port, problem) from None


def _listen_error(host: str, port: int, problem: OSError) -> UsageError:
    if problem.errno == errno.EADDRINUSE:
        return UsageError(
            "port-taken",
            f"port {port} is taken; the server was not started",
            facts=[("port", port), ("likely owner", _likely_owner(port))],
            remedy=f"Stop it, or choose another port: --port {port + 1 if port < 65535 else port - 1}.",
        )
    if problem.errno == errno.EACCES:
        return UsageError(
            "port-not-allowed",
            f"port {port} needs privileges this user does not have; use --port 11434",
            remedy="vox-host serve --port 11434",
        )
    return UsageError(
        "address-unusable",
        f"{host}:{port} can't be listened on: {problem.strerror or problem}",
        remedy="Give another --port, or end what listens there.",
    )


def _likely_owner(port: int) -> str:
    """Name the process that listens, as far as this user may see it."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections(kind="tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port:
                if connection.pid is None:
                    break
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    if port == DEFAULT_PORT:
        return "Ollama, whose default port this is (not confirmed)"
    return "unknown (another user's process)"


def _bound_port(runner: web.AppRunner, port: int) -> int:
    addresses = runner.addresses
    return int(addresses[0][1]) if port == 0 and addresses else port


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


@contextlib.contextmanager
def _stop_signals(stop: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    handled = []
    for number in (signal.SIGINT, signal.SIGTERM):
        # Only the main thread may handle signals; elsewhere the caller sets `stop` itself.
        with contextlib.suppress(RuntimeError, ValueError):
            loop.add_signal_handler(number, stop.set)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
