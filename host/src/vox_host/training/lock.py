"""One trainer at a time in a run directory."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from vox_host.errors import UsageError
from vox_host.quoted import quoted

__all__ = ["held_run"]

_NAME = ".lock"


@contextlib.contextmanager
def held_run(folder: Path) -> Iterator[None]:
    """Hold the run while the block runs; the system lets go of it however this process ends.

    Raises:
        UsageError: another process holds it, or a folder is in its place.
    """
    path = folder / _NAME
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except IsADirectoryError:
        raise UsageError(
            "run-lock",
            f"{path} is a folder, and a run is held by a file of that name; nothing was started",
            remedy=f"Move it elsewhere: `mv {quoted(path)} {quoted(f'{folder}-lock')}`.",
        ) from None
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
