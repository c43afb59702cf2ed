"""A folder or file that is there whole or not at all: written aside, flushed, renamed."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from vox_host.errors import UsageError

__all__ = ["refuse_target", "whole_folder", "write_file"]


def refuse_target(out: Path) -> None:
    """Refuse a target that is there, or has no folder to be in, before any work is done.

    Raises:
        UsageError: `out-exists` or `out-folder`.
    """
    if out.exists() or out.is_symlink():
        raise UsageError(
            "out-exists",
            f"{out} exists; nothing was written, since nothing is ever replaced",
            remedy="Name a folder that isn't there yet.",
        )
    if not out.absolute().parent.is_dir():
        raise UsageError(
            "out-folder",
            f"{out.absolute().parent} is not a folder; nothing was written",
            remedy="Make it first, or name another place.",
        )


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Path]:
    """Hand out an empty folder beside `out`; where the block ends well, flush it and give it that name.

    Raises:
        UsageError: `out-exists`, `out-folder`, or `export-failed` with the system's reason; nothing is at
            `out`.
    """
    refuse_target(out)
    out = out.absolute()
    aside = out.with_name(f".{out.name}.partial")
    try:
        # What an export that was killed left behind.
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        yield aside
        _sync_tree(aside)
        aside.rename(out)
        _sync(out.parent)
    except OSError as error:
        raise UsageError(
            "export-failed",
            f"{out} can't be written: {error.strerror or error}; it is not there",
            facts=[("path", str(error.filename or out))],
            remedy="Make room or name another folder, and repeat the command.",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
