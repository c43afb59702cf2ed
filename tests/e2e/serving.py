"""A live `vox-host serve` for a test, its requests, and its processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

READY_TIMEOUT_S = 60.0


@dataclass
class Server:
    """One server process."""

    process: subprocess.Popen[bytes]
    port: int

    def request(self, method: str, path: str, body: Any = None, timeout: float = 120) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, prompt: Any, tokens: int, **options: Any) -> dict[str, Any]:
        status, answer = self.request(
            "POST", "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
        )
        assert status == 200, answer
        return answer

    def stream(self, prompt: Any, tokens: int, **options: Any) -> Iterator[dict[str, Any]]:
        """Yield the events of a streamed completion as they come."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **options}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        with contextlib.closing(connection):
            for line in connection.getresponse():
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    yield json.loads(line[6:])

    def worker(self) -> psutil.Process:
        """The plugin's process."""
        for process in psutil.Process(self.process.pid).children(recursive=True):
            if "vox_plugin_api.child" in process.cmdline():
                return process
        raise AssertionError("the server has no worker")

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


@contextlib.contextmanager
def serving(cli, model: str, *arguments: str) -> Iterator[Server]:
    """Serve until the block ends; whatever happens, nothing is left."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = cli.start("serve", "--model", model, "--port", str(port), *arguments)
    server = Server(process, port)
    try:
        wait_until(lambda: is_ready(server) or process.poll() is not None, READY_TIMEOUT_S)
        assert process.poll() is None, process.stdout.read().decode()
        yield server
    finally:
        left = server.tree() if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            for victim in left:
                with contextlib.suppress(psutil.Error):
                    victim.kill()
        process.stdout.close()


def is_ready(server: Server) -> bool:
    try:
        status, health = server.request("GET", "/health", timeout=5)
    except (OSError, http.client.HTTPException):
        return False
    return status == 200 and health["status"] == "ok"


def wait_until(condition, timeout_s: float, every_s: float = 0.05) -> None:
    """Wait for `condition`; fail when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_s} s"
        time.sleep(every_s)
