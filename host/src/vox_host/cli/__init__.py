"""The command line: the only code that prints.

One module per command group, imported only when its command is named, so that `plugin list`
does not pay for a server. A module joins by a row in `COMMANDS` and a function
`register(app)` that adds its commands to the root.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import platform
import signal
import sys
from collections.abc import Sequence
from types import FrameType

import typer

import vox_host
from vox_host.cli import output
from vox_host.cli.stopping import BEGINS_AGAIN, told_when_stopped
from vox_host.errors import UsageError

__all__ = ["main", "run"]

COMMANDS: dict[str, tuple[str, str]] = {
    "doctor": ("vox_host.cli.doctor", "Show this machine, and which plugin would run on it and why."),
    "plugin": ("vox_host.cli.plugin", "Install, list, show, explain, verify, check and remove plugins."),
    "model": ("vox_host.cli.model", "Import, list, show, verify and remove models."),
    "generate": ("vox_host.cli.generate", "Continue a prompt."),
    "chat": ("vox_host.cli.generate", "Talk with a model."),
    "serve": ("vox_host.cli.serve", "Serve a model over HTTP."),
    "train": ("vox_host.cli.train", "Fine-tune an adapter on a file of rows."),
    "merge": ("vox_host.cli.merge", "Fold an adapter into its base model, as a model of its own."),
    "export": ("vox_host.cli.export", "Write an adapter, or the merged model, for other software."),
    "parity": ("vox_host.cli.parity", "Compare plugins, or ways of one, byte for byte."),
    "demo": ("vox_host.cli.demo", "The main job from end to end, on a small real model."),
}
"""Command to the module that has it and the line shown in --help."""

_OPEN_A_MODEL = {"generate", "chat", "serve", "train"}
_SUPPORTED = {"Linux", "Darwin"}

_MAY_BE_EMPTY = {"--prompt", "--system", "--stop"}
"""Options with a text of the user's own; what an empty one means is their commands' business."""


def main() -> None:
    """Run the command line and exit with its status."""
    output.prepare_streams()
    signal.signal(signal.SIGTERM, _terminate)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        # Until now `vox_host.entry` has heard it; who starts a command in the background may have it ignored.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    status = run(sys.argv[1:])
    # Nothing is left that could be stopped.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # what could not be written was told or has no reader
            stream.flush()
    # Everything was closed where it was opened. Taking the interpreter down, a large vocabulary piece by
    # piece, would take a tenth of a second more.
    os._exit(status)


def _terminate(number: int, _: FrameType | None) -> None:
    # Like Ctrl-C: what was begun is cleaned up on the way out. A second one can't disturb that.
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)


def run(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status: errors become text here and nowhere else."""
    wants_json = "--json" in arguments
    # The two options of the root are looked up here: they decide how a failure while parsing looks.
    root = list(arguments[: _position_of_command(arguments)])
    try:
        with told_when_stopped(lambda: "what had not been finished was not kept"):
            return _run(arguments)
    except typer.Exit as stopped:
        return stopped.exit_code
    except BrokenPipeError:
        # The reader has gone (`vox-host ... | head`); nothing is wrong and nobody listens.
        output.silence_stdout()
        return 141
    except Exception as error:  # noqa: BLE001 (one of the two broad catches there are)
        return output.report_error(error, debug="--debug" in root, as_json=wants_json)


def _run(arguments: Sequence[str]) -> int:
    with told_when_stopped(lambda: f"nothing was done, {BEGINS_AGAIN}"):
        if platform.system() not in _SUPPORTED:
            output.print_line(
                f"vox-host runs on Linux and macOS; this is {platform.system()}. Nothing was done.",
                error=True,
            )
            return 3
        _check_encoding(arguments)
        _refuse_empty(arguments)
        app = _build(arguments)
    status = app(list(arguments), prog_name="vox-host", standalone_mode=False)
    output.flush_output()
    return status if isinstance(status, int) else 0


def _check_encoding(arguments: Sequence[str]) -> None:
    for position, argument in enumerate(arguments, start=1):
        try:
            argument.encode("utf-8")
        except UnicodeEncodeError:
            raise UsageError(
                "usage", f"argument {position} is not valid UTF-8: {argument.encode('utf-8', 'replace')!r}"
            ) from None


def _refuse_empty(arguments: Sequence[str]) -> None:
    # An empty text is what an unset variable of a shell leaves; as a path it would be the current folder.
    for position, argument in enumerate(arguments):
        before = arguments[position - 1] if position else ""
        option, is_joined, value = argument.partition("=")
        if argument == "" and before not in _MAY_BE_EMPTY:
            what = before if before.startswith("--") else f"argument {position + 1}"
        elif argument.startswith("--") and is_joined and not value and option not in _MAY_BE_EMPTY:
            what = option
        else:
            continue
        raise UsageError(
            "usage",
            f"{what} is empty; nothing was done",
            remedy="Give it a value, or leave it out. An unset variable of a shell is an empty text.",
        )


def _build(arguments: Sequence[str]) -> typer.Typer:
    app = typer.Typer(
        help="Runs and checks language models through verified backend plugins, one process each.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_root)
    position = _position_of_command(arguments)
    wanted = arguments[position] if position < len(arguments) else None
    if wanted in COMMANDS and _exists(COMMANDS[wanted][0]):
        if wanted in _OPEN_A_MODEL and "--help" not in arguments:
            importlib.import_module("vox_host.cli.early_probe").begin()
        importlib.import_module(COMMANDS[wanted][0]).register(app)
    else:
        for name, (module, help_line) in COMMANDS.items():
            if _exists(module):
                app.command(name, help=help_line)(_never_called)
    return app


def _print_version(wanted: bool) -> None:
    if wanted:
        output.print_line(f"vox-host {vox_host.__version__}")
        raise typer.Exit


def _root(
    debug: bool = typer.Option(False, "--debug", help="Add the traceback to an error."),
    verbose: bool = typer.Option(False, "--verbose", help="Log what is done to stderr."),
    version: bool = typer.Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    if verbose:
        logging.basicConfig(
            level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
        )


def _position_of_command(arguments: Sequence[str]) -> int:
    for index, argument in enumerate(arguments):
        if not argument.startswith("-"):
            return index
    return len(arguments)


def _exists(module: str) -> bool:
    # Our own modules: looking one up imports nothing but this package.
    return importlib.util.find_spec(module) is not None


def _never_called() -> None:
    """Stand for a command in the root's help."""
