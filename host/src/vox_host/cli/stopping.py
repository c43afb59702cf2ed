"""What a command says that is stopped by Ctrl-C or SIGTERM where nothing else waits for one."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from vox_host.cli.output import print_line

__all__ = ["told_when_stopped"]


@contextmanager
def told_when_stopped(words: Callable[[], str]) -> Iterator[None]:
    """Say `stopped; WORDS` on stderr where SIGINT or SIGTERM ends what is within.

    Typer turns a KeyboardInterrupt into status 130 without a word, so it has to be caught before.

    Args:
        words: how things stand and how to go on, asked once all was cleaned up.

    Raises:
        typer.Exit: 130 after SIGINT.
        SystemExit: 143 after SIGTERM, as it came.
    """
    try:
        yield
    except KeyboardInterrupt:
        print_line(f"stopped; {words()}", error=True)
        raise typer.Exit(128 + signal.SIGINT) from None
    except SystemExit as ended:
        if ended.code == 128 + signal.SIGTERM:
            print_line(f"stopped; {words()}", error=True)
        raise
