"""Where the stdout and stderr of a worker process go: a file of its own, or the host's stderr.

A file can be read again after any death, and nobody waits for its reader. Where none can be
opened (a read-only home, a full disk) the worker still serves: it then writes to the host's
stderr, and errors can't quote its last lines.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

__all__ = ["HOST_STDERR", "WorkerLog", "open_log"]

HOST_STDERR = 2
"""The descriptor; the command line has seen to it that it is open."""
_TAIL_BYTES = 8 * 1024
_LOGS_KEPT = 20
_STAGE_BYTES = 1 << 20
_STAGE_MARK = b"vox-plugin-api: "


@dataclass(frozen=True, slots=True)
class WorkerLog:
    """The log of one process."""

    path: Path | None
    """None: the host's stderr."""
    problem: str | None = None
    """Why there is no file."""

    def __str__(self) -> str:
        return str(self.path) if self.path is not None else "the stderr of vox-host"

    def stage(self) -> str | None:
        """Return what the worker's start was doing last, by its own words; None: it has not said."""
        if self.path is None:
            return None
        with contextlib.suppress(OSError), self.path.open("rb") as log:
            for line in reversed(log.read(_STAGE_BYTES).splitlines()):
                if line.startswith(_STAGE_MARK):
                    return line.removeprefix(_STAGE_MARK).decode("utf-8", "replace")
        return None

    def tail(self) -> str:
        """Return the end of what the process has written, at most 8 KiB; nothing without a file."""
        if self.path is None:
            return ""
        with self.path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            return log.read().decode("utf-8", "replace")


def open_log(folder: Path, plugin_id: str) -> tuple[WorkerLog, BinaryIO | None]:
    """Open a new file for one process and forget the oldest ones of the same plugin."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        older = sorted(folder.glob(f"{plugin_id}-2*.log"))
        for path in older[: -(_LOGS_KEPT - 1)]:
            path.unlink(missing_ok=True)
        for number in itertools.count():
            path = folder / f"{plugin_id}-{stamp}-{os.getpid()}-{number}.log"
            with contextlib.suppress(FileExistsError):
                return WorkerLog(path), path.open("xb")
    except OSError as error:
        return WorkerLog(None, f"{folder}: {error.strerror or error}"), None
    raise AssertionError("unreachable: numbers do not end")
