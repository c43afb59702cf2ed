"""Where the program begins: Ctrl-C and SIGTERM are answered before the command line is imported.

Importing it takes some 0.2 s, in which Python's own answer to Ctrl-C would be a traceback.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

__all__ = ["main"]


def main() -> None:
    """Run the command line and exit with its status."""
    for number in (signal.SIGINT, signal.SIGTERM):
        # Who starts a command in the background may have Ctrl-C ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _stop)
    from vox_host import cli

    cli.main()


def _stop(number: int, _: FrameType | None) -> None:
    # Nothing was begun: there is nothing to clean up, and nothing else to run.
    os.write(2, b"stopped; nothing was done, and the same command begins again\n")
    os._exit(128 + number)
