"""model-manifest.json: what a model directory of the store holds, where it came from, on what terms."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vox_host.errors import ModelError
from vox_plugin_api.checkpoint import CheckpointError, read_json_object

__all__ = [
    "LICENSE_FOLDER",
    "MODEL_MANIFEST",
    "FileRecord",
    "LicenseRecord",
    "ModelManifest",
    "manifest_text",
    "model_digest",
    "read_manifest",
]

MODEL_MANIFEST = "model-manifest.json"

LICENSE_FOLDER = "license/"
"""Where a model directory keeps the terms that came with it."""

_HEX = r"^[0-9a-f]{64}$"


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


class ModelManifest(_Strict):
    """The content of model-manifest.json."""

    schema_version: int = Field(default=1, ge=1, le=1)
    name: str
    digest: str = Field(pattern=_HEX)
    """`model_digest` of the files."""
    architecture: str
    license: LicenseRecord
    source: dict[str, Any]
    imported_at: str
    """UTC, ISO 8601."""
    files: dict[str, FileRecord]


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
        ModelError: it is missing, malformed, or its digest isn't that of the files it lists.
    """
    try:
        fields = read_json_object(path, code="model-manifest-invalid")
        manifest = ModelManifest.model_validate(fields)
    except CheckpointError as error:
        raise ModelError(error.code, error.message, facts=list(error.facts.items())) from None
    except ValidationError as error:
        problems = [(".".join(map(str, e["loc"])), e["msg"]) for e in error.errors()]
        raise ModelError(
            "model-manifest-invalid", f"{path} is not a model manifest", facts=problems
        ) from None
    found = model_digest({name: record.sha256 for name, record in manifest.files.items()})
    if found != manifest.digest:
        raise ModelError(
            "model-manifest-invalid",
            f"{path} was changed: its digest is not that of the files it lists",
            facts=[("expected", manifest.digest), ("found", found)],
        )
    return manifest


def manifest_text(manifest: ModelManifest) -> str:
    """Return the manifest as it is written."""
    return json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
