"""Digests of files that were not touched since they were last read, and files replaced in one step."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

__all__ = ["StatCache", "write_aside"]

Hex = str


def write_aside(path: Path, data: bytes) -> None:
    """Replace the file at `path` in one step: written beside it, flushed, renamed.

    Raises:
        OSError: it can't be written, and the old one stands; its `filename` is `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as problem:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(problem, OSError):
            # A write that fails names no file, and the one beside is nobody's.
            raise OSError(problem.errno, problem.strerror, str(path)) from problem
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


class StatCache:
    """Digests by what `stat` says, as of the last check of one tree. Take the `stat` before the bytes."""

    def __init__(self, path: Path, tree_digest: Hex, files: dict[str, list[Any]]) -> None:
        self._path = path
        self._tree_digest = tree_digest
        self._old = files
        self._new: dict[str, list[Any]] = {}

    @classmethod
    def load(cls, path: Path, tree_digest: Hex) -> StatCache:
        """Read the cache at `path`; an empty one if it is missing, unreadable, or of another tree."""
        # A cache that can't be read costs time, never safety: everything is hashed again.
        try:
            data = json.loads(path.read_bytes())
            files = data["files"] if data["tree_digest"] == tree_digest else {}
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            files = {}
        return cls(path, tree_digest, files if isinstance(files, dict) else {})

    def lookup(self, path: Path, info: os.stat_result) -> Hex | None:
        """Return the digest that `path` had at the last check, unless `info` says it was touched."""
        key, facts = str(path), _stat_facts(info)
        known = self._old.get(key)
        if not isinstance(known, list) or known[:-1] != facts:
            return None
        self._new[key] = known
        return str(known[-1])

    def knows(self, path: Path) -> bool:
        """Return whether a check of `path` is on record, of whatever it held then."""
        return str(path) in self._old

    def remember(self, path: Path, info: os.stat_result, digest: Hex) -> None:
        """Note what was found; `save` keeps it."""
        self._new[str(path)] = [*_stat_facts(info), digest]

    def save(self) -> None:
        """Write what was looked up and remembered, and nothing else, for the next check."""
        if self._new == self._old:
            return
        # Read-only media are fine: the next check hashes again.
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            data = {"tree_digest": self._tree_digest, "files": self._new}
            write_aside(self._path, json.dumps(data).encode())


def _stat_facts(info: os.stat_result) -> list[int]:
    # The change time as well: the modification time can be set back, it can't.
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino, info.st_dev]
