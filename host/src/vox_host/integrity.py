"""Digests of installed trees, the receipts that record them, and the check before a start.

A receipt proves integrity, not origin: it says that an environment holds the bytes that were
installed. The tree digest covers every file, link and folder of the plugin's environment (so
added files and .pth files count) and the interpreter that runs it.

Who writes receipts is `installation`; who asks for the check is `launch` and the command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_host.errors import IntegrityError, PluginError

__all__ = [
    "Distribution",
    "Interpreter",
    "Receipt",
    "StatCache",
    "TreeEntry",
    "Verification",
    "describe_interpreter",
    "describe_trust",
    "digest_of_file",
    "listing_of_tree",
    "listing_path",
    "load_receipt",
    "parse_listing",
    "read_entries",
    "verify_installation",
    "write_aside",
]

Hex = str
_CHUNK = 1 << 20


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Interpreter(_Record):
    """The interpreter an environment runs on; it lies outside the tree."""

    path: str
    """After following every link."""
    version: str
    implementation: str
    size: int
    sha256: str


class Distribution(_Record):
    """One distribution in an environment."""

    name: str
    version: str
    record: str
    """Its RECORD, relative to the tree; it has the SHA-256 of every file the wheel brought."""
    record_sha256: str


class TreeEntry(NamedTuple):
    """One name in an installed tree."""

    kind: Literal["file", "folder", "link"]
    path: str
    """Relative, with forward slashes."""
    value: str
    """SHA-256 of a file, target of a link, empty for a folder."""


class Receipt(_Record):
    """What an installation recorded; its presence makes the plugin visible."""

    schema_version: Literal[1] = Field(default=1, alias="schema")
    plugin: str
    version: str
    trust: Literal["verified", "development"]
    """verified: `archive` matched a released manifest's checksum; development: no checksum was given.
    It says nothing of `distributions` other than the plugin's own."""
    source: str
    """The path that was installed, as given."""
    archive: str
    """The name of the wheel or library that was placed."""
    archive_sha256: str
    source_digest: str
    """What was asked for: lets a second installation of the same thing stop early."""
    environment: str
    """The tree's folder, relative to the receipt's folder."""
    manifest: str
    """Plugin.toml, relative to the tree."""
    manifest_digest: str
    packages: str
    """The folder that modules are imported from, relative to the tree; empty for a plain library."""
    python: str | None
    """The interpreter's name in the tree, relative to it; None for a plain native library."""
    interpreter: Interpreter | None
    distributions: tuple[Distribution, ...] = ()
    """What was installed, the plugin's dependencies among them. The installer chose and fetched
    those; each was as its RECORD says, and the tree digest covers their files."""
    tree_digest: str
    """SHA-256 of the listing beside the tree, which says what the tree held."""
    platform: str
    host_version: str
    created: str
    """UTC, ISO 8601."""


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


def load_receipt(path: Path) -> Receipt:
    """Read one receipt.

    Raises:
        PluginError: it is not a receipt of this version.
    """
    try:
        receipt = Receipt.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "(file)"
        raise PluginError(
            "receipt-invalid",
            f"{path} is not a receipt of this host",
            facts=[(where, first["msg"])],
            remedy=f"Install the plugin again, or remove it: vox-host plugin remove {path.stem}",
        ) from None
    except OSError as error:
        raise PluginError("receipt-unreadable", f"{path} can't be read: {error.strerror}") from None
    if receipt.plugin != path.stem:
        raise PluginError(
            "receipt-invalid",
            f'{path} is the receipt of another plugin, "{receipt.plugin}"',
            remedy=f"vox-host plugin remove {path.stem}",
        )
    for name in (receipt.environment, receipt.manifest, receipt.packages, receipt.python or "python"):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise PluginError("receipt-invalid", f"{path} names a path outside the plugin folder: {name}")
    return receipt


def describe_trust(receipt: Receipt) -> str:
    """Return what was held against a released checksum, and what only against later changes."""
    others = len(receipt.distributions) - (receipt.python is not None)
    own = (
        f"{receipt.archive} matched its released checksum"
        if receipt.trust == "verified"
        else f"no checksum vouches for {receipt.archive}"
    )
    if others <= 0:
        return own
    named = "its dependency" if others == 1 else f"its {others} dependencies"
    return f"{own}; none vouches for {named}, recorded as installed"


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, for reports."""

    files: int
    hashed: int
    """Files read in full; the others had the size, times and inode of the last full check."""


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

    found = {
        entry.path: entry for entry in read_entries(root, interpreter=interpreter, file_digest=file_digest)
    }
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


def write_aside(path: Path, data: bytes) -> None:
    """Replace the file at `path` in one step: written beside it, flushed, renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
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
        except (OSError, ValueError, KeyError, TypeError):
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


def _cache_path(plugins_dir: Path, receipt: Receipt) -> Path:
    return plugins_dir / ".checked" / f"{Path(receipt.environment).name}.json"


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
