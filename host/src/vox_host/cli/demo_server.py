"""A `vox-host serve` of the demo's own, and asking it over HTTP."""

from __future__ import annotations

import http.client
import json as jsonlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from vox_host.cli.output import print_line
from vox_host.errors import VoxError

__all__ = ["get", "post", "serving"]

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
ANSWER_TIMEOUT_S = 300.0


@contextmanager
def serving(model: str) -> Iterator[int]:
    """Run `vox-host serve --model MODEL` on a free port until the block ends."""
    port = _free_port()
    command = [sys.executable, "-m", "vox_host", "serve", "--model", model, "--port", str(port)]
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            _wait_until_ready(server, port, log)
            yield port
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(server: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
    started = time.monotonic()
    while True:
        if server.poll() is not None or time.monotonic() - started > START_TIMEOUT_S:
            log.seek(0)
            lines = log.read().decode("utf-8", "replace").strip().splitlines()[-12:]
            raise VoxError(
                "demo-serve",
                f"`vox-host serve` did not become ready (status {server.poll()})",
                facts=[("output", line) for line in lines],
            )
        try:
            health = get(port, "/health")
        except (OSError, http.client.HTTPException, ValueError):
            health = {}
        if health.get("status") == "ok":
            print_line(f"    ready after {time.monotonic() - started:.1f} s")
            return
        time.sleep(0.1)


def get(port: int, path: str) -> dict[str, Any]:
    """Return the answer of a server on this machine."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer: dict[str, Any] = jsonlib.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def post(port: int, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Return the answer of a server on this machine, and the seconds it took.

    Raises:
        VoxError: it refused.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_TIMEOUT_S)
    started = time.monotonic()
    try:
        connection.request("POST", path, jsonlib.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer: dict[str, Any] = jsonlib.loads(response.read())
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        detail = answer.get("error", {}).get("message", "no message")
        raise VoxError(
            "demo-request",
            f"the server answered {response.status}: {detail}",
        )
    return answer, time.monotonic() - started
