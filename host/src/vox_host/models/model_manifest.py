"""model-manifest.json: what a model directory of the store holds, where it came from, on what terms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_host.errors import IntegrityError, ModelError
from vox_plugin_api.checkpoint import CheckpointError, read_json_object

__all__ = [
    "LICENSE_FOLDER",
    "MERGED_FROM",
    "MODEL_MANIFEST",
    "FileRecord",
    "LicenseRecord",
    "MergedFrom",
    "ModelManifest",
    "manifest_text",
    "model_digest",
    "read_manifest",
    "read_merged_from",
]

MODEL_MANIFEST = "model-manifest.json"

MERGED_FROM = "merged-from.json"
"""In a model that an adapter was merged into: of what it was made. It is one of the model's files."""

LICENSE_FOLDER = "license/"
"""Where a model directory keeps the terms that came with it."""

_HEX = r"^[0-9a-f]{64}$"
_CHANGED = "model-manifest-changed"
_AGAIN = "Import the model again from its source."


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileRecord(_Strict):
    """One file of the model."""

    sha256: str = Field(pattern=_HEX)
    size_bytes: int = Field(ge=0)


class LicenseRecord(_Strict):
    """The terms that were shown and accepted at import."""

    id: str
    terms: str
    accepted: bool


class MergedFrom(_Strict):
    """The base and the adapter that a merged model was made of."""

    base_digest: str = Field(pattern=_HEX)
    adapter_digest: str = Field(pattern=_HEX)
    """Of the adapter's tensors (docs/numerics.md)."""


class ModelManifest(_Strict):
    """The content of model-manifest.json."""

    schema_version: int = Field(default=1, ge=1, le=1)
    name: str
    digest: str = Field(pattern=_HEX)
    """`model_digest` of the files."""
    architecture: str
    license: LicenseRecord
    source: dict[str, Any]
    merged_from: MergedFrom | None = None
    """None: it is as its publisher made it."""
    imported_at: str
    """UTC, ISO 8601."""
    files: dict[str, FileRecord]
    manifest_digest: str | None = Field(default=None, pattern=_HEX)
    """SHA-256 of this file's text with null here. None: in memory, and where an older vox-host wrote it."""


def model_digest(digests: Mapping[str, str]) -> str:
    """Return the digest that names a model: SHA-256 over "DIGEST  NAME\\n" of its files, sorted by name.

    The licence's text is no part of it: the same weights are the same model, wherever they came from.
    """
    names = sorted(name for name in digests if not name.startswith(LICENSE_FOLDER))
    lines = "".join(f"{digests[name]}  {name}\n" for name in names)
    return hashlib.sha256(lines.encode()).hexdigest()


def read_manifest(path: Path) -> ModelManifest:
    """Read the manifest at `path`.

    Raises:
        ModelError: it can't be read, or a newer vox-host wrote it.
        IntegrityError: it isn't what was written.
    """
    try:
        fields = read_json_object(path, code=_CHANGED)
        version = fields.get("schema_version")
        if type(version) is int and version > 1:
            raise ModelError(
                "model-manifest-version",
                f"{path} is of a newer vox-host",
                facts=[("expected", "schema_version 1"), ("found", version)],
                remedy="Use that vox-host, or import the model again with this one.",
            )
        manifest = ModelManifest.model_validate(fields)
    except CheckpointError as error:
        raise IntegrityError(_CHANGED, error.message, facts=_both(path), remedy=_AGAIN) from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise IntegrityError(
            _CHANGED, f"{path} is not a model manifest: {problems}", facts=_both(path), remedy=_AGAIN
        ) from None
    _compare(path, "its digest is not that of its own text", manifest.manifest_digest, _own_digest(manifest))
    found = model_digest({name: record.sha256 for name, record in manifest.files.items()})
    _compare(path, "its digest is not that of the files it lists", manifest.digest, found)
    return manifest


def read_merged_from(path: Path) -> MergedFrom | None:
    """Read merged-from.json of the folder `path`; None: it has none.

    Raises:
        ModelError: `merged-from`: it isn't what a merge writes.
    """
    file = path / MERGED_FROM
    if not file.exists():
        return None
    try:
        return MergedFrom.model_validate(read_json_object(file, code="merged-from"))
    except CheckpointError as error:
        raise ModelError(
            error.code, error.message, facts=list(error.facts.items()), remedy=error.remedy
        ) from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ModelError(
            "merged-from",
            f"{file} is not what a merge writes: {problems}",
            facts=[("expected", "base_digest and adapter_digest, 64 hex digits each")],
            remedy="Merge again, or delete the file: the model is then taken as it stands.",
        ) from None


def manifest_text(manifest: ModelManifest) -> str:
    """Return the manifest as it is written, its own digest included."""
    return _text(manifest.model_copy(update={"manifest_digest": _own_digest(manifest)}))


def _own_digest(manifest: ModelManifest) -> str:
    text = _text(manifest.model_copy(update={"manifest_digest": None}))
    return hashlib.sha256(text.encode()).hexdigest()


def _text(manifest: ModelManifest) -> str:
    fields = manifest.model_dump(mode="json")
    # Manifests from before there were merged models lack the word, and their digest is over their text.
    if fields["merged_from"] is None:
        del fields["merged_from"]
    return json.dumps(fields, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _compare(path: Path, problem: str, expected: str | None, found: str) -> None:
    if expected is not None and expected != found:
        raise IntegrityError(
            _CHANGED,
            f"{path} was changed: {problem}",
            facts=[("expected", f"sha256:{expected}"), ("found", f"sha256:{found}")],
            remedy=_AGAIN,
        )


def _both(path: Path) -> list[tuple[str, str]]:
    try:
        found = f"sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    except OSError as error:
        # What can't be read need not have been changed.
        raise ModelError(
            "model-manifest-unreadable",
            f"{path} cannot be read: {error.strerror}",
            remedy="Allow this user to read it, or import the model again.",
        ) from None
    # A manifest has its digest inside: of one that can't be read, it is lost too.
    return [("expected", "the manifest that the import wrote"), ("found", found)]
