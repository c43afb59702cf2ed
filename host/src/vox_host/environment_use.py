"""Who runs workers from a plugin's environment holds it, so that nobody tidies it away meanwhile.

A hold is a shared lock of `.environments/NAME.lock`, kept until the process ends, however it
ends. An environment may be removed by whoever gets the lock alone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows keeps files that are open from being removed
    fcntl = None  # type: ignore[assignment]

__all__ = ["alone_with", "hold_environment", "lock_path"]

_held: dict[Path, int] = {}


def lock_path(plugins_dir: Path, environment: str) -> Path:
    """Return where an environment's lock lies: beside it, named after it."""
    tree = plugins_dir / environment
    return tree.with_name(f"{tree.name}.lock")


def hold_environment(plugins_dir: Path, environment: str) -> None:
    """Keep an environment (relative to the plugin folder) from being tidied away while this process runs.

    It never waits and never fails: where no lock can be made, nothing can be removed either.
    """
    path = lock_path(plugins_dir, environment)
    if fcntl is None or path in _held or not (plugins_dir / environment).is_dir():
        return
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            # It is being removed at this moment; the check of its bytes will say so.
            os.close(descriptor)
            raise
        _held[path] = descriptor


@contextlib.contextmanager
def alone_with(plugins_dir: Path, environment: str) -> Iterator[bool]:
    """Say whether nobody holds an environment; while the block runs, nobody can begin to."""
    path = lock_path(plugins_dir, environment)
    if fcntl is None or not path.exists():
        yield True
        return
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)
