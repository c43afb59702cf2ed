"""The distributions in a plugin's environment: which they are, and whether each is what its wheel recorded.

Installers compare no file with its wheel's RECORD. Here it is done once, from the tree as it was
read for the listing, before anything is visible.
"""

from __future__ import annotations

import base64
import csv
import posixpath
from collections.abc import Iterable
from email.parser import HeaderParser
from pathlib import Path

from vox_host.errors import IntegrityError
from vox_host.installed_tree import TreeEntry
from vox_host.receipt import Distribution

__all__ = ["installed_distributions"]


def installed_distributions(
    tree: Path, packages: str, entries: Iterable[TreeEntry]
) -> tuple[Distribution, ...]:
    """Return what lies in the folder `packages` of `tree`, sorted by name.

    Raises:
        IntegrityError: a file is not what the RECORD of its distribution says.
    """
    digests = {entry.path: entry.value for entry in entries if entry.kind == "file"}
    found = []
    for info in sorted((tree / packages).glob("*.dist-info")):
        record = f"{packages}/{info.name}/RECORD"
        if record not in digests:
            raise _mismatch(tree, info.name, record, "a RECORD", "no such file")
        _compare(tree, packages, info.name, digests)
        metadata = HeaderParser().parsestr((info / "METADATA").read_text(encoding="utf-8"))
        found.append(
            Distribution(
                name=str(metadata["Name"]),
                version=str(metadata["Version"]),
                record=record,
                record_sha256=digests[record],
            )
        )
    return tuple(sorted(found, key=lambda distribution: distribution.name.lower()))


def _compare(tree: Path, packages: str, info: str, digests: dict[str, str]) -> None:
    with (tree / packages / info / "RECORD").open(encoding="utf-8", newline="") as file:
        for path, recorded, *_ in csv.reader(file):
            algorithm, _, value = recorded.partition("=")
            # Compiled files and RECORD itself have no digest. A stronger one than the listing's (none
            # was seen yet) is not compared; the tree digest holds such files from here on.
            if algorithm != "sha256":
                continue
            inside = posixpath.normpath(f"{packages}/{path}")
            expected = base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
            if digests.get(inside) != expected:
                shown = digests.get(inside)
                found = f"sha256:{shown}" if shown else "no such file"
                raise _mismatch(tree, info, inside, f"sha256:{expected}", found)


def _mismatch(tree: Path, info: str, path: str, expected: str, found: str) -> IntegrityError:
    return IntegrityError(
        "distribution-mismatch",
        f"{info.removesuffix('.dist-info')} was not installed as its RECORD says; nothing was installed",
        facts=[("file", str(tree / path)), ("expected", expected), ("found", found)],
        remedy="Clear the installer's cache (uv cache clean, pip cache purge) and install again.",
    )
