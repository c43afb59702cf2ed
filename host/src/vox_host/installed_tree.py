"""An installed tree as it lies on the disk: its entries, their digests, the listing that records them."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from vox_host.errors import IntegrityError
from vox_host.receipt import Interpreter

__all__ = [
    "TreeEntry",
    "describe_interpreter",
    "digest_of_file",
    "listing_of_tree",
    "listing_path",
    "parse_listing",
    "read_entries",
]

Hex = str
_CHUNK = 1 << 20


class TreeEntry(NamedTuple):
    """One name in an installed tree."""

    kind: Literal["file", "folder", "link"]
    path: str
    """Relative, with forward slashes."""
    value: str
    """SHA-256 of a file, target of a link, empty for a folder."""


def digest_of_file(path: Path) -> Hex:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def listing_of_tree(entries: Iterable[TreeEntry], interpreter: Interpreter | None) -> bytes:
    """Return the text whose SHA-256 is the tree digest: one JSON line per name, sorted by path
    bytes, then the interpreter's."""
    rows: list[list[str]] = [list(entry) for entry in sorted(entries, key=lambda e: os.fsencode(e.path))]
    if interpreter is not None:
        rows.append(
            [
                "interpreter",
                interpreter.path,
                interpreter.sha256,
                interpreter.implementation,
                interpreter.version,
            ]
        )
    return "".join(json.dumps(row) + "\n" for row in rows).encode("ascii")


def parse_listing(listing: bytes) -> dict[str, TreeEntry]:
    """Return the entries of a listing by path."""
    rows = [json.loads(line) for line in listing.splitlines()]
    return {row[1]: TreeEntry(row[0], row[1], row[2]) for row in rows if row[0] != "interpreter"}


def listing_path(plugins_dir: Path, environment: str) -> Path:
    """Return where the listing of a tree lies: beside it, named after it."""
    tree = plugins_dir / environment
    return tree.with_name(f"{tree.name}.tree")


def read_entries(
    root: Path,
    *,
    interpreter: Interpreter | None = None,
    file_digest: Callable[[Path, os.stat_result], Hex] | None = None,
) -> list[TreeEntry]:
    """Read a whole tree, sorted by path bytes.

    A link must stay inside, except one whose end is the recorded interpreter.

    Raises:
        IntegrityError: a link leads outside, or something is neither file, folder nor link.
    """
    hash_file = file_digest or (lambda path, _: digest_of_file(path))
    real_root = Path(os.path.realpath(root))
    allowed = None if interpreter is None else interpreter.path
    entries = []
    for relative, path, info in _walk(root):
        if stat.S_ISLNK(info.st_mode):
            target = str(path.readlink())
            end = os.path.realpath(path)
            inside = Path(end) == real_root or real_root in Path(end).parents
            if not inside and end != allowed:
                raise IntegrityError(
                    "link-escape",
                    f"a link in {root} leads outside it; nothing was started",
                    facts=[("link", relative), ("target", target), ("resolves to", end)],
                    remedy="Install the plugin again: vox-host plugin install --path SOURCE --force",
                )
            entries.append(TreeEntry("link", relative, target))
        elif stat.S_ISDIR(info.st_mode):
            entries.append(TreeEntry("folder", relative, ""))
        elif stat.S_ISREG(info.st_mode):
            entries.append(TreeEntry("file", relative, hash_file(path, info)))
        else:
            raise IntegrityError(
                "odd-file",
                f"{path} is neither a file, a folder nor a link; nothing was started",
                facts=[("mode", oct(info.st_mode))],
                remedy="Install the plugin again: vox-host plugin install --path SOURCE --force",
            )
    return sorted(entries, key=lambda e: os.fsencode(e.path))


def describe_interpreter(path: Path, *, version: str, implementation: str) -> Interpreter:
    """Identify the interpreter that `path` (usually a link) ends at."""
    real = Path(os.path.realpath(path))
    return Interpreter(
        path=str(real),
        version=version,
        implementation=implementation,
        size=real.stat().st_size,
        sha256=digest_of_file(real),
    )


def _walk(root: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    pending = [("", root)]
    while pending:
        prefix, folder = pending.pop()
        with os.scandir(folder) as names:
            for name in names:
                relative = prefix + name.name
                info = name.stat(follow_symlinks=False)
                yield relative, Path(name.path), info
                if stat.S_ISDIR(info.st_mode):
                    pending.append((relative + "/", Path(name.path)))
