"""A new folder that is there whole or not at all: written aside, flushed, renamed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from vox_host.errors import UsageError
from vox_plugin_api.unwritten import IS_FULL, errno_name, what_helps

__all__ = ["Making", "refuse_target", "whole_folder", "write_file"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Making:
    """Where one command differs from another: what it says of its folder, and who makes those above.

    The defaults are those of merge and export.
    """

    option: str = ""
    """What the path is called, before it."""
    undone: str = "nothing was written"
    """What has not happened where a target is refused."""
    never: str = "nothing is ever replaced"
    if_there: Callable[[Path], str] = lambda out: "Name a folder that isn't there yet."
    """The remedy where something is at the path."""
    if_nowhere: str = "Make it first, or name another place."
    failed_code: str = "export-failed"
    failed: str = "it is not there"
    if_failed: str = "Make room or name another folder, and repeat the command."
    makes_parents: bool = False


def refuse_target(out: Path, making: Making | None = None) -> None:
    """Refuse a target that is there, or that has no folder to be made in, before any work is done.

    Raises:
        UsageError: `out-exists` or `out-folder`.
    """
    making = making or Making()
    if out.exists() or out.is_symlink():
        raise UsageError(
            "out-exists",
            f"{making.option}{out} exists; {making.undone}, since {making.never}",
            remedy=making.if_there(out),
        )
    above = out.absolute().parent
    while making.makes_parents and not above.exists() and above != above.parent:
        above = above.parent
    if not above.is_dir():
        raise UsageError(
            "out-folder",
            f"{making.option}{out}: {above} is not a folder; {making.undone}",
            remedy=making.if_nowhere,
        )
    if not os.access(above, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(above).f_flag & os.ST_RDONLY
        why = "is on a read-only file system" if is_read_only else "is not writable"
        raise UsageError(
            "out-folder",
            f"{making.option}{out}: {above} {why}; {making.undone}",
            remedy=f"{what_helps('EROFS' if is_read_only else 'EACCES')}, or name another place.",
        )


@contextlib.contextmanager
def whole_folder(out: Path, making: Making | None = None) -> Iterator[Path]:
    """Hand out an empty folder beside `out`; where the block ends well, flush it and give it that name.

    Raises:
        UsageError: `out-exists`, `out-folder`, or the command's own code with the system's reason;
            nothing is at `out`.
    """
    making = making or Making()
    refuse_target(out, making)
    place = out.absolute()
    aside = place.with_name(f".{place.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        if making.makes_parents:
            place.parent.mkdir(parents=True, exist_ok=True)
        # A folder that can't be listed may be written all the same.
        with contextlib.suppress(OSError):
            _sweep(place)
        aside.mkdir()
        with _held(aside):
            yield aside
            _sync_tree(aside)
            # Meanwhile something may have come there; a rename would take an empty folder's place.
            refuse_target(out, making)
            aside.rename(place)
        _sync(place.parent)
    except OSError as error:
        raise UsageError(
            making.failed_code,
            f"{making.option}{out} can't be written: {error.strerror or error}; {making.failed}",
            facts=[("path", str(error.filename or out))],
            remedy=making.if_failed if errno_name(error) in IS_FULL else "Name another place.",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a new file and flush it."""
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Hold a folder that is being filled, so that no other process takes it for a remainder."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        # A disk without locks sweeps nothing either.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _sweep(place: Path) -> None:
    """Remove what those that were killed left of this very target: nobody holds it any more."""
    start, end = f".{place.name}.", ".partial"
    for left in place.parent.iterdir():
        middle = left.name.removeprefix(start).removesuffix(end)
        if left.name != f"{start}{middle}{end}" or len(middle) != 8 or not left.is_dir():
            continue
        descriptor = os.open(left, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue
        else:
            shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(descriptor)


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
