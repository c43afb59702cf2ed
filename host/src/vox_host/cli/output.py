"""How results and errors look: JSON for programs, plain text and small tables for people."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from vox_host.errors import VoxError

__all__ = [
    "print_json",
    "print_line",
    "print_progress",
    "print_table",
    "print_warning",
    "render_error",
    "report_error",
    "silence_stdout",
]


def print_line(text: str, *, error: bool = False) -> None:
    """Print one line to stdout, or to stderr."""
    stream = sys.stderr if error else sys.stdout
    stream.write(f"{text}\n")
    stream.flush()


def print_progress(text: str) -> None:
    """Say on stderr what is being done."""
    print_line(f"  {text}", error=True)


def print_warning(text: str) -> None:
    """Say on stderr what a user must not miss."""
    print_line(f"warning: {text}", error=True)


def print_json(value: Any) -> None:
    """Print facts for programs: one JSON document, keys in order."""
    print_line(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print rows in aligned columns; the last column may be as wide as it likes."""
    # Hand-made: text that is piped to a file must not be cut to the width of no terminal.
    lines = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    for line in lines:
        print_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def render_error(error: VoxError) -> str:
    """Return an error as text: what failed, the facts in aligned rows, the next command."""
    lines = [f"error[{error.code}]: {error.message}"]
    width = max((len(name) for name, _ in error.facts), default=0)
    for name, value in error.facts:
        # Lines of a log stay lines; any other list is read in one.
        between = "\n" if name == "last lines" else ", "
        shown = between.join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        first, *more = shown.splitlines() or [""]
        lines.append(f"  {name:<{width}}  {first}".rstrip())
        lines += [f"  {'':<{width}}  {line}".rstrip() for line in more]
    if error.remedy:
        lines.append(error.remedy)
    return "\n".join(lines)


def report_error(error: Exception, *, debug: bool, as_json: bool) -> int:
    """Print an error and return the exit status for it."""
    if debug:
        traceback.print_exception(error, file=sys.stderr)
    if isinstance(error, VoxError):
        print_line(render_error(error), error=True)
        if as_json:
            print_json({"error": error.as_dict()})
        return error.exit_code
    if type(error).__name__ == "Abort":
        print_line("Stopped; nothing more was done.", error=True)
        return 130
    format_message = getattr(error, "format_message", None)
    if callable(format_message):
        # A parsing error of the command line; typer's and click's classes share this method only.
        if type(error).__name__ == "NoArgsIsHelpError":
            print_line(str(format_message()), error=True)
            return 2
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "vox-host"
        usage = VoxError("usage", str(format_message()), remedy=f"{command} --help")
        print_line(render_error(usage), error=True)
        if as_json:
            print_json({"error": usage.as_dict()})
        return 2
    print_line(f"error[bug]: {type(error).__name__}: {error}", error=True)
    print_line(
        "This is a fault of vox-host, not of yours. Please report it with the command and the output of "
        "`vox-host --debug ...`.",
        error=True,
    )
    if as_json:
        print_json({"error": {"code": "bug", "message": f"{type(error).__name__}: {error}"}})
    return 1


def silence_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
