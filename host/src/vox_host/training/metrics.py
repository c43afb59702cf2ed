"""metrics.jsonl and timings.jsonl of a run: written line by line, each line flushed to disk.

`metrics.jsonl` holds results alone: a run that was interrupted and resumed writes the same bytes as
one that was not, since it is cut back to what the checkpoint saw. What depends on the machine and the
hour (seconds, memory, restarts) goes to `timings.jsonl`, which only grows.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_host.errors import IntegrityError
from vox_host.stat_cache import write_aside

__all__ = ["NOTHING", "LineFile", "Mark", "read_lines"]


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in the file: how many bytes are before it, and their SHA-256."""

    size_bytes: int
    sha256: str


NOTHING = Mark(0, hashlib.sha256().hexdigest())


class LineFile:
    """A file of JSON lines that is appended to."""

    def __init__(self, path: Path, *, keep: Mark | None = None, is_durable: bool = True) -> None:
        """Open it; with `keep`, cut it back to that place first.

        Args:
            is_durable: wait for the disk after each line.

        Raises:
            IntegrityError: what lies before that place is not what was written.
            OSError: it can't be read or written.
        """
        self._path = path
        self._is_durable = is_durable
        self._digest, self._size = hashlib.sha256(), 0
        if keep is not None:
            self._cut(keep)
        # To be read, too: a file whose name is gone is still here.
        self._file = path.open("a+b", buffering=0)

    @property
    def mark(self) -> Mark:
        """The end of the file: of what this object knows to be in it."""
        return Mark(self._size, self._digest.hexdigest())

    def append(self, facts: Mapping[str, Any]) -> None:
        """Write one line; where it is to be durable, return when it is on disk.

        Raises:
            OSError: it could not be; a part of the line may be there, which a resumed run cuts off.
        """
        line = json.dumps(facts, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        # A full disk may take a part of a line without an error.
        written = 0
        while written < len(line):
            written += self._file.write(line[written:]) or 0
        if self._is_durable:
            os.fsync(self._file.fileno())
        self._digest.update(line)
        self._size += len(line)

    def check_in_place(self) -> None:
        """Refuse to go on where the path names another file than the one that is written, or none.

        What was written is kept first, so that a run that is resumed has its lines: at the path where
        nothing is there, and beside it, as `NAME.written`, where another file is.

        Raises:
            IntegrityError: it is gone, is another file, or something else wrote in it.
            OSError: the folder is gone too, or what was written can't be kept.
        """
        ours = os.fstat(self._file.fileno())
        try:
            there = self._path.stat()
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise
            found, kept = "no such file", self._path
        else:
            if not os.path.samestat(ours, there):
                found, kept = "another file", self._path.with_name(f"{self._path.name}.written")
            elif ours.st_size != self._size:
                raise self._not_ours(
                    f"{there.st_size} bytes",
                    "Something else wrote in it. Where it no longer begins with what the run wrote, "
                    "those lines are lost: begin a new run. Otherwise",
                )
            else:
                return
        self._file.seek(0)
        write_aside(kept, self._file.readall() or b"")
        if kept == self._path:
            raise self._not_ours(found, "Its lines were put back.")
        raise self._not_ours(found, f"What the run wrote is in {kept}: move that to {self._path}.")

    def close(self) -> None:
        self._file.close()

    def _not_ours(self, found: str, remedy: str) -> IntegrityError:
        return IntegrityError(
            "metrics-changed",
            f"{self._path} is no longer the file that the run wrote; the run was stopped, and its last "
            "checkpoint is whole",
            facts=[
                ("file", str(self._path)),
                ("expected", f"the file that the run opened, {self._size} bytes"),
                ("found", found),
            ],
            remedy=remedy,
        )

    def _cut(self, keep: Mark) -> None:
        try:
            data = self._path.read_bytes()[: keep.size_bytes]
        except FileNotFoundError:
            data = b""
        found = hashlib.sha256(data)
        if len(data) != keep.size_bytes or found.hexdigest() != keep.sha256:
            raise IntegrityError(
                "metrics-changed",
                f"{self._path} does not begin with what the run wrote up to its last checkpoint; "
                "nothing was started",
                facts=[
                    ("file", str(self._path)),
                    ("expected", f"{keep.size_bytes} bytes, sha256:{keep.sha256}"),
                    ("found", f"{len(data)} bytes, sha256:{found.hexdigest()}"),
                ],
                remedy="Put the file back, or begin a new run.",
            )
        if self._path.exists():
            os.truncate(self._path, keep.size_bytes)
        self._digest, self._size = found, keep.size_bytes


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; a last one that was cut off is left out."""
    if not path.exists():
        return []
    whole = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in whole]
