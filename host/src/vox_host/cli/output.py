"""How results and errors look: JSON for programs, plain text and small tables for people."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from vox_host.errors import UsageError, VoxError
from vox_host.printable import printable

__all__ = [
    "flush_output",
    "prepare_streams",
    "print_json",
    "print_line",
    "print_piece",
    "print_progress",
    "print_table",
    "print_warning",
    "render_error",
    "report_error",
    "silence_stdout",
]


def print_line(text: str, *, error: bool = False) -> None:
    """Print one line to stdout, or to stderr, where the words may be a plugin's or a file's."""
    if not error:
        print_piece(f"{text}\n")
        return
    text = printable(text, keep="\n\t")
    # Where stderr can't be written there is nobody to tell.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def print_piece(text: str) -> None:
    """Print a piece of an answer to stdout, at once.

    Raises:
        BrokenPipeError: the reader has gone.
        UsageError: stdout can't be written.
    """
    sys.stdout.write(text)
    sys.stdout.flush()


def flush_output() -> None:
    """Write what other code has left in stdout; raises like `print_piece`."""
    print_piece("")


class _Stdout(io.TextIOWrapper):
    """A stdout that says of itself that it can't be written, whoever writes: `--help` is printed by typer."""

    def write(self, text: str) -> int:
        with _named():
            return super().write(text)

    def flush(self) -> None:
        with _named():
            super().flush()


@contextlib.contextmanager
def _named() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        # Without its number: click takes one that has it for its own, and ends with 1.
        raise BrokenPipeError("the reader of standard output has gone") from None
    except OSError as error:
        silence_stdout()
        reason = error.strerror or error
        raise UsageError(
            "output-failed",
            f"standard output can't be written: {reason}",
            remedy="Write into a file, or to where there is room: `vox-host ... > FILE`.",
        ) from None


def print_progress(text: str) -> None:
    """Say on stderr, in one line, what is being done."""
    print_line(f"  {' '.join(text.splitlines())}", error=True)


def print_warning(text: str) -> None:
    """Say on stderr, in one line, what a user must not miss."""
    print_line(f"warning: {' '.join(text.splitlines())}", error=True)


def print_json(value: Any) -> None:
    """Print facts for programs: one JSON document, keys in order."""
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print_line(json.dumps(value, indent=2, ensure_ascii=not is_unicode, default=str))


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
    facts = [(name, value) for name, value in error.facts if value not in ("", [], (), {})]
    if error.in_text is not None and len(facts) > error.in_text:
        left = len(facts) - error.in_text
        facts = [*facts[: error.in_text], ("and", f"{left} more, which the same command lists with --json")]
    width = max((len(name) for name, _ in facts), default=0)
    for name, value in facts:
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
    if isinstance(error, OSError):
        error = _as_usage_error(error) or error
    if isinstance(error, VoxError):
        print_line(render_error(error), error=True)
        if as_json:
            _print_error_json(error.as_dict())
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
        usage = VoxError("usage", f"{format_message()}{_value_given(error)}", remedy=f"{command} --help")
        print_line(render_error(usage), error=True)
        if as_json:
            _print_error_json(usage.as_dict())
        return 2
    print_line(f"error[bug]: {type(error).__name__}: {error}", error=True)
    print_line(
        "This is a fault of vox-host, not of yours. Please report it with the command and the output of "
        "`vox-host --debug ...`.",
        error=True,
    )
    if as_json:
        _print_error_json({"code": "bug", "message": f"{type(error).__name__}: {error}"})
    return 1


def _value_given(error: Exception) -> str:
    """Return the value that a range refused: the parser's own message leaves it out."""
    problems = getattr(error.__cause__, "errors", None)
    first: dict[str, Any] = next(iter(problems()), {}) if callable(problems) else {}
    return f"; found {first['input']!r:.80}" if "input" in first else ""


def _print_error_json(facts: dict[str, Any]) -> None:
    # The text on stderr has said it already; a stdout that can't be written adds nothing.
    try:
        print_json({"error": facts})
    except BrokenPipeError:
        silence_stdout()
    except UsageError:
        pass


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_REFUSED = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_OTHER = frozenset({errno.ENOTDIR, errno.EISDIR, errno.EIO, errno.ELOOP, errno.ENAMETOOLONG, errno.EMFILE})


def _as_usage_error(error: OSError) -> UsageError | None:
    """Return what the machine refused as the user's to solve; None: it may be our fault."""
    number = error.errno
    path = error.filename2 or error.filename
    shown = os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else None
    if number not in _FULL | _REFUSED | _OTHER:
        return None
    message = f"{shown}: {error.strerror}" if shown else str(error.strerror)
    if number in _FULL:
        return UsageError("disk-full", message, remedy="Free some disk space and try again.")
    if number in _REFUSED:
        remedy = (
            "Make it accessible to this user, or name another place (VOX_HOME for all that vox-host keeps)."
        )
        return UsageError("not-writable", message, remedy=remedy)
    return UsageError("file-error", message)


def prepare_streams() -> None:
    """Make the three standard streams usable whatever the caller and the locale have left of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is taken, and no file that is opened later can get it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    # A character that the terminal does not know is no reason to fail; escaped, it is not lost either.
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper):
        was, encoding, by_line = sys.stdout, sys.stdout.encoding, sys.stdout.line_buffering
        sys.stdout = _Stdout(
            was.detach(), encoding=encoding, errors="backslashreplace", line_buffering=by_line
        )
        if sys.__stdout__ is was:
            # The interpreter flushes this one as it ends, and the old one has no file any more.
            sys.__stdout__ = sys.stdout  # type: ignore[misc]


def silence_stdout() -> None:
    """Point stdout nowhere, so that the interpreter's last flush does not fail again."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
