"""The check before a start: an installed tree against its receipt.

A receipt proves integrity, not origin: it says that an environment holds the bytes that were
installed. The tree digest covers every file, link and folder of the plugin's environment (so
added files and .pth files count) and the interpreter that runs it.

Who writes receipts is `installation`; who asks for the check is `launch` and the command line.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vox_host.errors import IntegrityError
from vox_host.installed_tree import TreeEntry, digest_of_file, listing_path, parse_listing, read_entries
from vox_host.receipt import Interpreter, Receipt
from vox_host.stat_cache import StatCache

__all__ = ["LastCheck", "Verification", "since_last_check", "verify_installation"]

Hex = str


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, for reports."""

    files: int
    hashed: int
    """Files read in full; the others had the size, times and inode of the last full check."""


@dataclass(frozen=True, slots=True)
class LastCheck:
    """What `stat` tells of an installed tree against its last check."""

    state: Literal["ok", "changed", "unchecked"]
    """ok: no file was touched since; changed: one was; unchecked: no check is on record."""
    file: str = ""
    """The first such file; empty where the state is ok."""


def since_last_check(receipt: Receipt, plugins_dir: Path) -> LastCheck:
    """Say whether an installed tree was touched since its last check; reads no file of it."""
    root = plugins_dir / receipt.environment
    cache = StatCache.load(_cache_path(plugins_dir, receipt), receipt.tree_digest)
    unchecked: dict[str, None] = {}

    def file_digest(path: Path, info: os.stat_result) -> Hex:
        if not cache.knows(path):
            unchecked[str(path)] = None
        return cache.lookup(path, info) or ""

    try:
        recorded = _recorded_entries(receipt, plugins_dir, root)
        entries = read_entries(root, interpreter=receipt.interpreter, file_digest=file_digest)
        if receipt.interpreter is not None:
            path = Path(receipt.interpreter.path)
            if file_digest(path, path.stat()) != receipt.interpreter.sha256 and str(path) not in unchecked:
                return LastCheck("changed", str(path))
    except IntegrityError as error:
        facts = dict(error.facts)
        return LastCheck("changed", str(facts.get("file") or facts.get("link") or root))
    except OSError as error:
        return LastCheck("changed", str(error.filename))
    found = {entry.path: entry for entry in entries}
    for name in sorted(recorded.keys() | found.keys(), key=os.fsencode):
        known = name in recorded and str(root / name) in unchecked
        if recorded.get(name) != found.get(name) and not known:
            return LastCheck("changed", str(root / name))
    return LastCheck("unchecked", next(iter(unchecked))) if unchecked else LastCheck("ok")


def verify_installation(receipt: Receipt, plugins_dir: Path, *, full: bool = False) -> Verification:
    """Compare an installed tree with its receipt.

    With `full` every byte is read. Otherwise a file whose size, modification and change times
    and inode are those of the last check is taken to hold what it held then.

    Raises:
        IntegrityError: anything differs; it names the first file with both digests.
    """
    root = plugins_dir / receipt.environment
    if not root.is_dir():
        raise _mismatch(receipt, "(tree)", "a folder", "missing", root)
    interpreter = receipt.interpreter
    cache = StatCache.load(_cache_path(plugins_dir, receipt), receipt.tree_digest)
    if interpreter is not None:
        _verify_interpreter(receipt, interpreter, cache, full=full)
    recorded = _recorded_entries(receipt, plugins_dir, root)
    hashed = 0

    def file_digest(path: Path, info: os.stat_result) -> Hex:
        nonlocal hashed
        known = None if full else cache.lookup(path, info)
        if known is not None:
            return known
        hashed += 1
        digest = digest_of_file(path)
        cache.remember(path, info, digest)
        return digest

    try:
        entries = read_entries(root, interpreter=interpreter, file_digest=file_digest)
    except FileNotFoundError as error:
        # Somebody removes the tree at this moment.
        raise _mismatch(receipt, str(error.filename), "a file", "missing", root) from None
    found = {entry.path: entry for entry in entries}
    for path in sorted(recorded.keys() | found.keys(), key=os.fsencode):
        if recorded.get(path) != found.get(path):
            raise _mismatch(receipt, path, _show(recorded.get(path)), _show(found.get(path)), root)
    cache.save()
    return Verification(files=len(found), hashed=hashed)


def _recorded_entries(receipt: Receipt, plugins_dir: Path, root: Path) -> dict[str, TreeEntry]:
    path = listing_path(plugins_dir, receipt.environment)
    try:
        listing = path.read_bytes()
    except OSError:
        raise _mismatch(receipt, "(listing)", f"sha256:{receipt.tree_digest}", "no such file", root) from None
    digest = hashlib.sha256(listing).hexdigest()
    if digest != receipt.tree_digest:
        raise _mismatch(receipt, "(listing)", f"sha256:{receipt.tree_digest}", f"sha256:{digest}", root)
    return parse_listing(listing)


def _cache_path(plugins_dir: Path, receipt: Receipt) -> Path:
    return plugins_dir / ".checked" / f"{Path(receipt.environment).name}.json"


def _verify_interpreter(receipt: Receipt, interpreter: Interpreter, cache: StatCache, *, full: bool) -> None:
    path = Path(interpreter.path)
    try:
        info = path.stat()
    except OSError:
        raise _interpreter_changed(receipt, interpreter, "missing") from None
    digest = None if full else cache.lookup(path, info)
    if digest is None:
        digest = digest_of_file(path)
        cache.remember(path, info, digest)
    if digest != interpreter.sha256:
        raise _interpreter_changed(receipt, interpreter, f"sha256:{digest}")


def _interpreter_changed(receipt: Receipt, interpreter: Interpreter, found: str) -> IntegrityError:
    return IntegrityError(
        "interpreter-changed",
        f'the Python that plugin "{receipt.plugin}" was installed with has changed; it was not started',
        facts=[
            ("file", interpreter.path),
            ("expected", f"sha256:{interpreter.sha256}  (Python {interpreter.version}, {receipt.created})"),
            ("found", found),
        ],
        remedy=f"After a Python update, install again: vox-host plugin install --path {receipt.source}",
    )


def _show(entry: TreeEntry | None) -> str:
    if entry is None:
        return "no such file"
    if entry.kind == "file":
        return f"sha256:{entry.value}"
    return f"{entry.kind} {entry.value}".rstrip()


def _mismatch(receipt: Receipt, file: str, expected: str, found: str, root: Path) -> IntegrityError:
    return IntegrityError(
        "integrity-mismatch",
        f'plugin "{receipt.plugin}" does not match its receipt; it was not started',
        facts=[
            ("file", f"{file} {root}" if file.startswith("(") else str(root / file)),
            ("expected", f"{expected}  (receipt of {receipt.created})"),
            ("found", found),
        ],
        remedy=(
            "If you made this change, review it and install the plugin again; if you did not, do the same "
            f"from a source you trust: vox-host plugin install --path {receipt.source}"
        ),
    )
