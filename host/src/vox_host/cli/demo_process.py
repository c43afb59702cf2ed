"""A vox-host command of the demo's own: a process that may clean up when the demo is stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["let_end", "own_command"]

STOP_LIMIT_S = 60.0


@contextmanager
def own_command(arguments: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Start `vox-host ARGUMENTS`; where Ctrl-C or SIGTERM ends the block, it may clean up or save first."""
    process = subprocess.Popen([sys.executable, "-m", "vox_host", *arguments], stdin=subprocess.DEVNULL)
    try:
        yield process
    except KeyboardInterrupt:
        # The terminal has told it too, and a second signal would cut short what it saves.
        let_end(process)
        raise
    except SystemExit:
        process.send_signal(signal.SIGTERM)
        let_end(process)
        raise


def let_end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a command that was told to stop; one that does not is killed."""
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
