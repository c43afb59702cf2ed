"""vox-host serve: a model over HTTP."""

from __future__ import annotations

import logging
import sys
from typing import Annotated

import typer

from vox_host.app.compose import OpenModel
from vox_host.cli.model_options import Model, RunOptions, with_model
from vox_host.cli.option_groups import grouped
from vox_host.cli.output import print_line
from vox_host.cli.stopping import stoppable, told_when_stopped
from vox_host.server.run import DEFAULT_PORT, check_port_is_free, serve
from vox_host.server.security import check_binding
from vox_host.settings import load_settings

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the root."""
    app.command("serve", help="Serve a model over HTTP.")(grouped(serve_model))


@stoppable("the server was not started")
def serve_model(
    *,
    model: Model,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 picks a free one.")
    ] = DEFAULT_PORT,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key", help="What clients must send (better: VOX_API_KEY, which ps does not show)."
        ),
    ] = None,
    run: RunOptions,
) -> None:
    """Serve a model over HTTP until Ctrl-C or SIGTERM."""
    settings = load_settings()
    key = api_key or settings.api_key
    # Before the model is loaded for nothing.
    check_binding(host, key)
    check_port_is_free(host, port)
    options = run.for_model(model)
    _log_to_stderr()

    listens = False

    async def use(opened: OpenModel) -> None:
        def announce(url: str) -> None:
            nonlocal listens
            listens = True
            _announce(url, opened, has_key=key is not None)

        await serve(opened.service, host=host, port=port, api_key=key, when_listening=announce)

    cut = "answers that were not whole yet were cut short"
    with told_when_stopped(lambda: cut if listens else "the server was not started"):
        with_model(settings, options, use)
    print_line("stopped", error=True)


def _announce(url: str, opened: OpenModel, *, has_key: bool) -> None:
    info = opened.service.info
    print_line(f"vox-host serves {info.name} at {url}/v1 (plugin {info.plugin_id}, lane {info.lane})")
    if has_key:
        print_line("clients must send the API key")
    print_line("Ctrl-C stops it", error=True)


def _log_to_stderr() -> None:
    """Failures while answering are told to clients without their insides; those go here."""
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        for name in ("vox_host.server", "vox_host.workers"):
            logging.getLogger(name).addHandler(handler)
        # Each end of a worker is told here; other commands print the error itself.
        logging.getLogger("vox_host.workers").setLevel(logging.INFO)
