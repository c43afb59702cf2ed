"""What an installation recorded, read back."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_host.errors import IntegrityError, PluginError

__all__ = ["Distribution", "Interpreter", "Receipt", "describe_trust", "load_receipt", "receipt_text"]


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
    receipt_digest: str | None = None
    """In the file: SHA-256 of what it says, with null here. None: in memory, and of an older vox-host."""


def receipt_text(receipt: Receipt) -> str:
    """Return the receipt as it is written, its own digest included."""
    fields = receipt.model_dump(mode="json", by_alias=True)
    return json.dumps({**fields, "receipt_digest": _own_digest(fields)}, indent=1) + "\n"


def _own_digest(fields: dict[str, Any]) -> str:
    # Of the fields as the file has them: one that a later vox-host adds doesn't change an old receipt's.
    text = json.dumps({**fields, "receipt_digest": None}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def load_receipt(path: Path) -> Receipt:
    """Read one receipt.

    Raises:
        PluginError: it is not a receipt of this version.
        IntegrityError: it doesn't say what the installation wrote.
    """
    try:
        content = path.read_bytes()
        receipt = Receipt.model_validate_json(content)
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
        raise PluginError(
            "receipt-unreadable",
            f"{path} can't be read: {error.strerror}",
            remedy=f"Allow this user to read it, or remove the plugin: vox-host plugin remove {path.stem}",
        ) from None
    _check_digest(path, receipt, content)
    if receipt.plugin != path.stem:
        raise PluginError(
            "receipt-invalid",
            f'{path} is the receipt of another plugin, "{receipt.plugin}"',
            remedy=f"vox-host plugin remove {path.stem}",
        )
    for name in (receipt.environment, receipt.manifest, receipt.packages, receipt.python or "python"):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise PluginError(
                "receipt-invalid",
                f"{path} names a path outside the plugin folder: {name}",
                remedy=f"Install the plugin again, or remove it: vox-host plugin remove {path.stem}",
            )
    return receipt.model_copy(update={"receipt_digest": None})


def _check_digest(path: Path, receipt: Receipt, content: bytes) -> None:
    if receipt.receipt_digest is None:
        return
    found = _own_digest(json.loads(content))
    if found != receipt.receipt_digest:
        raise IntegrityError(
            "receipt-changed",
            f"{path} was changed after the installation: its digest is not that of what it says; "
            "the plugin was not started",
            facts=[("expected", f"sha256:{receipt.receipt_digest}"), ("found", f"sha256:{found}")],
            remedy=f"Install the plugin again, or remove it: vox-host plugin remove {path.stem}",
        )


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
