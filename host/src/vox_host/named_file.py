"""Read a file that a user named and that is held whole: never more than its kind can be, never for ever."""

from __future__ import annotations

import stat
from pathlib import Path

from vox_host.errors import UsageError
from vox_host.printable import printable

__all__ = ["TEXT_LIMIT_BYTES", "kind_of_file", "read_named"]

TEXT_LIMIT_BYTES = 64 * 1024 * 1024
"""Of a text of the user's own: no model reads so much."""


def read_named(
    path: Path,
    option: str,
    *,
    undone: str = "nothing was started",
    limit_bytes: int = TEXT_LIMIT_BYTES,
    may_be_stream: bool = False,
) -> bytes:
    """Return what is in the file that `option` names.

    Args:
        undone: what did not happen, for the message.
        may_be_stream: a pipe or device is read as well, up to the limit: the shell's `<(COMMAND)` is one.

    Raises:
        UsageError: `file-unreadable`, `file-not-a-file` or `file-too-long`.
    """
    named = f"{option} {printable(str(path))}"
    try:
        # A pipe without a writer would hold an open() for ever, so its kind is asked first.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode) and not (may_be_stream and not stat.S_ISDIR(mode)):
            raise UsageError(
                "file-not-a-file",
                f"{named}: this is {kind_of_file(mode)}; {undone}",
                facts=[("expected", "a regular file")],
                remedy="Write it to a file and name that.",
            )
        with path.open("rb") as file:
            data = file.read(limit_bytes + 1)
    except (OSError, ValueError) as problem:
        reason = getattr(problem, "strerror", None) or problem
        raise UsageError(
            "file-unreadable", f"{named}: {reason}; {undone}", remedy="Name a file that this user can read."
        ) from None
    if len(data) > limit_bytes:
        raise UsageError(
            "file-too-long",
            f"{named}: it is longer than {limit_bytes >> 20} MiB; {undone}",
            remedy="Name a shorter file.",
        )
    return data


def kind_of_file(mode: int) -> str:
    """Say what something that is no regular file is, of its `st_mode`."""
    if stat.S_ISDIR(mode):
        return "a folder"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a device or socket"
