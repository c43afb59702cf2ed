"""One trainer at a time in a run directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from vox_host.errors import UsageError

__all__ = ["held_run"]

_NAME = ".lock"


@contextlib.contextmanager
def held_run(folder: Path) -> Iterator[None]:
    """Hold the run while the block runs; the system lets go of it however this process ends.

    Raises:
        UsageError: another process holds it.
    """
    descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 64, 0).decode("ascii", "replace").strip()
            raise UsageError(
                "run-busy",
                f"{folder} is being trained by another process; nothing was started",
                facts=[("process", holder)],
                remedy="Wait for it, or stop it with Ctrl-C: it saves what it has.",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)
