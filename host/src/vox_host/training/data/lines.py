"""The lines of a data file, one at a time, with the digest of all of it.

A file may be larger than memory and is read more than once (to check it, to encode it, when a run
resumes), so it has to be a regular file and to stay as it is.
"""

from __future__ import annotations

import hashlib
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vox_host.errors import UsageError
from vox_host.named_file import kind_of_file

__all__ = ["LINE_LIMIT_BYTES", "Line", "LineReader", "changed", "open_lines"]

LINE_LIMIT_BYTES = 16 * 1024 * 1024
_PIECE_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Line:
    """One line without its end; None where it is longer than any row is."""

    number: int
    content: bytes | None


class LineReader:
    """Yields lines; once all are read, `digest` is that of the file."""

    def __init__(self, stream: BinaryIO, path: Path) -> None:
        self._stream = stream
        self._path = path
        self._sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[Line]:
        number = 0
        while (line := self._read(LINE_LIMIT_BYTES)) != b"":
            number += 1
            if line.endswith(b"\n"):
                yield Line(number, line[:-1].removesuffix(b"\r"))
            elif len(line) < LINE_LIMIT_BYTES:
                yield Line(number, line)
            else:
                while (rest := self._read(_PIECE_BYTES)) != b"" and not rest.endswith(b"\n"):
                    pass
                yield Line(number, None)

    @property
    def digest(self) -> str:
        """SHA-256 of what was read, in hex."""
        return self._sha256.hexdigest()

    def _read(self, limit: int) -> bytes:
        try:
            line = self._stream.readline(limit)
        except OSError as error:
            raise UsageError(
                "data-unreadable",
                f"{self._path} can't be read to its end: {error.strerror or error}",
                remedy="Name a file that this user can read.",
            ) from None
        self._sha256.update(line)
        return line


@contextmanager
def open_lines(path: Path) -> Iterator[LineReader]:
    """Open a data file.

    Raises:
        UsageError: it is missing, is no regular file, or can't be opened.
    """
    try:
        # A pipe without a writer would hold an open() for ever, so its kind is asked first.
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise UsageError(
                "data-not-a-file",
                f"{path} is {kind_of_file(mode)}; nothing was read",
                facts=[("needed", "a regular file: it is read again to encode it, and when a run resumes")],
                remedy="Write the rows to a file and name that.",
            )
        stream = path.open("rb")
    except FileNotFoundError:
        raise UsageError(
            "data-missing", f"{path} does not exist; nothing was read", remedy="Name the file with --data."
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            "data-unreadable",
            f"{path} can't be read: {reason}",
            remedy="Name a file that this user can read.",
        ) from None
    with stream:
        yield LineReader(stream, path)


def changed(path: Path) -> UsageError:
    """Return the error for a file that is not what it was."""
    return UsageError(
        "data-changed",
        f"{path} changed while it was read; nothing was trained",
        remedy="Train on a file that nothing else writes to.",
    )
