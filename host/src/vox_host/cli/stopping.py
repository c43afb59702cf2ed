"""What a command says that is stopped by Ctrl-C or SIGTERM where nothing else waits for one."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec

import typer

from vox_host.cli.output import print_line

__all__ = [
    "BEGINS_AGAIN",
    "COMPARED_IN_PART",
    "SHOWN_IN_PART",
    "is_another_file_since",
    "stoppable",
    "told_when_stopped",
]

P = ParamSpec("P")

SHOWN_IN_PART = "not all was shown, and nothing was changed"
"""Of a command that reads and prints."""
COMPARED_IN_PART = "not every byte was compared, and nothing was changed"
BEGINS_AGAIN = "and the same command begins again"


@contextmanager
def told_when_stopped(words: Callable[[], str]) -> Iterator[None]:
    """Say `stopped; WORDS` on stderr where SIGINT or SIGTERM ends what is within.

    Typer turns a KeyboardInterrupt into status 130 without a word, so it has to be caught before.

    Args:
        words: how things stand and how to go on, asked once all was cleaned up.

    Raises:
        typer.Exit: 130 after SIGINT, 143 after SIGTERM. It is told once: an outer block lets it pass.
    """
    try:
        yield
    except KeyboardInterrupt:
        _tell(words)
        raise typer.Exit(128 + signal.SIGINT) from None
    except SystemExit as ended:
        if ended.code != 128 + signal.SIGTERM:
            raise
        _tell(words)
        raise typer.Exit(128 + signal.SIGTERM) from None


def stoppable(words: str | Callable[..., str]) -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Return a decorator: a command that is stopped says `stopped; WORDS`, as `told_when_stopped` does.

    Args:
        words: how things stand, or a function that tells it from the command's own arguments.
    """

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **values: P.kwargs) -> None:
            with told_when_stopped(lambda: words if isinstance(words, str) else words(*args, **values)):
                command(*args, **values)

        return run

    return decorate


def is_another_file_since(path: Path) -> Callable[[], bool]:
    """Look at a file, there or not, and return what tells later whether it is another one by then."""
    before = _identity(path)
    return lambda: _identity(path) != before


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _tell(words: Callable[[], str]) -> None:
    print_line(f"stopped; {words()}", error=True)
