"""A tiny process that kills a process group when this process is gone, however that ends.

A shell reads from a pipe whose other end only this process holds. The read returns when the
kernel closes that end, after SIGKILL too, and the shell kills the group it was told of. It works
the same on Linux and macOS, and it reaches what the group's leader has started, which the
parent-death signal of Linux does not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from pathlib import Path

__all__ = ["SHELL", "Watchdog"]

SHELL = Path("/bin/sh")
# The first line names the group; the second read returns when the host's end closes.
_PROGRAM = 'read -r group || exit 0; read -r _; kill -s KILL -- "-$group"'


class Watchdog:
    """Start it before the process it is to watch, so that there is no time in which nobody does."""

    def __init__(self, popen: subprocess.Popen[bytes], lifeline: int) -> None:
        self._popen = popen
        self._lifeline = lifeline

    @classmethod
    def start(cls) -> Watchdog | None:
        """Start the shell; None where there is none.

        Raises:
            OSError: it can't be started.
        """
        if not SHELL.exists():
            return None
        read_end, write_end = os.pipe()
        try:
            popen = subprocess.Popen(
                [SHELL, "-c", _PROGRAM],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                # Out of reach of what is sent to this process's own group.
                start_new_session=True,
            )
        except BaseException:
            os.close(write_end)
            raise
        finally:
            os.close(read_end)
        return cls(popen, write_end)

    def watch(self, group: int) -> None:
        """Name the group to kill."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._lifeline, f"{group}\n".encode())

    def stop(self) -> None:
        """End the watch; nothing is killed."""
        self._popen.kill()
        self._popen.wait()
        os.close(self._lifeline)
