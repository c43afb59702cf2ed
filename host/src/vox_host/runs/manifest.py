"""adapter_manifest.json: what an adapter is, of what, made how, bound to its files byte by byte."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)

from vox_host.errors import IntegrityError, ModelError
from vox_host.quoted import quoted
from vox_host.runs.layout import PUBLISHED
from vox_plugin_api.messages import AdapterConfig, Numerics, NumericsError
from vox_plugin_api.strict_json import CheckpointError, parse_json_object

__all__ = [
    "MANIFEST_KIND",
    "MANIFEST_VERSION",
    "AdapterFacts",
    "AdapterManifest",
    "BaseModelRecord",
    "FileRecord",
    "NumericsRecord",
    "PluginRecord",
    "manifest_text",
    "parse_manifest",
]

MANIFEST_KIND = "vox-host adapter"
MANIFEST_VERSION = 3

_CHANGED = "adapter-manifest-changed"

Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


PublishedName = Annotated[
    str,
    Field(
        pattern=r"^(adapter_model\.safetensors|adapter_config\.json|tokenizer\.json|config\.json"
        r"|chat_template\.jinja)$"
    ),
]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class FileRecord(_Strict):
    """One file of the run."""

    sha256: Hex
    size_bytes: int = Field(ge=0)


class BaseModelRecord(_Strict):
    """The model that the adapter lies on."""

    name: str
    """In the store."""
    digest: Hex
    """The store's digest of its files."""
    path: str
    """Where it was, so that nothing needs to be fetched again on the same machine."""


class NumericsRecord(_Strict):
    """What the bits are made by."""

    mode: Numerics
    version: int = Field(ge=1)
    error: NumericsError | None = None
    """How far fast numerics were from canonical ones on the base, as it was loaded for this run."""

    @model_serializer(mode="wrap")
    def _without_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Canonical numerics have no such field, as they never had."""
        written: dict[str, Any] = write(self)
        if self.error is None:
            del written["error"]
        return written


class PluginRecord(_Strict):
    """Who trained."""

    id: str
    version: str
    tree_digest: Hex | None
    """Of the installed tree; None: a development install, which no receipt vouches for."""


class AdapterFacts(_Strict):
    """What whoever trained says of an adapter."""

    vox_host: str
    """Version."""
    base_model: BaseModelRecord
    rank: int = Field(ge=1, le=4096)
    alpha: float = Field(gt=0, allow_inf_nan=False)
    targets: tuple[str, ...] = Field(min_length=1)
    """As they were asked for."""
    rank_stabilised: bool
    dropout: float = Field(ge=0, lt=1)
    layer_order: tuple[str, ...] = Field(min_length=1)
    """The adapted layers, in the order of their keys (`TrainBeginResult.matrices`)."""
    base_key_map: dict[str, str]
    """The base model's tensor of each adapted layer (`base_tensors.base_key_map`)."""
    adapter_digest: Hex
    """Of the tensors, as `TrainStepResult` has it."""
    data_digest: Hex | None
    """SHA-256 of the data file."""
    numerics: NumericsRecord
    plugin: PluginRecord
    seed: int = Field(ge=0, lt=2**64)
    preset: str | None
    step: int = Field(ge=0)
    """Steps taken."""
    run_digest: Hex | None = None
    """That of the run's run.json, which it was trained as; None: an older vox-host published it."""

    @model_serializer(mode="wrap")
    def _without_nothing(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """An older manifest has no such field, and its digest is over its text."""
        written: dict[str, Any] = write(self)
        if self.run_digest is None:
            written.pop("run_digest", None)
        return written

    @model_validator(mode="before")
    @classmethod
    def _lists(cls, fields: Any) -> Any:
        # JSON has no tuples, and a strict model takes no list for one.
        if isinstance(fields, dict):
            names = [name for name in ("targets", "layer_order") if isinstance(fields.get(name), list)]
            return {**fields, **{name: tuple(fields[name]) for name in names}}
        return fields

    @model_validator(mode="after")
    def _check(self) -> AdapterFacts:
        if set(self.base_key_map) != set(self.layer_order) or len(set(self.layer_order)) != len(
            self.layer_order
        ):
            raise ValueError("layer_order and base_key_map must name the same layers, each once")
        return self

    @property
    def config(self) -> AdapterConfig:
        """The adapter's configuration as the wire has it."""
        return AdapterConfig(
            rank=self.rank,
            alpha=self.alpha,
            targets=list(self.layer_order),
            rank_stabilised=self.rank_stabilised,
            dropout=self.dropout,
        )


class AdapterManifest(AdapterFacts):
    """The content of adapter_manifest.json."""

    kind: Literal["vox-host adapter"] = "vox-host adapter"
    version: Literal[3] = 3
    files: dict[PublishedName, FileRecord]
    """adapter_model.safetensors and adapter_config.json, and those of `layout.BESIDE` that were there."""
    manifest_digest: Hex | None = None
    """SHA-256 of this file's text with null here."""


def manifest_text(manifest: AdapterManifest) -> str:
    """Return the manifest as it is written, its own digest included."""
    return _text(manifest.model_copy(update={"manifest_digest": _own_digest(manifest)}))


def parse_manifest(data: bytes, path: Path) -> AdapterManifest:
    """Read the text of a manifest; `path` is for messages.

    Raises:
        ModelError: another version of vox-host wrote it.
        IntegrityError: it isn't what was written.
    """
    try:
        fields = parse_json_object(data, source=str(path), code=_CHANGED)
    except CheckpointError as error:
        raise _changed(path, error.message, "the manifest that was published", data) from None
    version = fields.get("version")
    if type(version) is int and version != MANIFEST_VERSION:
        raise ModelError(
            "adapter-manifest-version",
            f"{path} has another version; nothing was loaded",
            facts=[("expected", MANIFEST_VERSION), ("found", version)],
            remedy="Use the vox-host that wrote it.",
        )
    try:
        manifest = AdapterManifest.model_validate(fields)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:5])
        raise _changed(path, problems, "the manifest that was published", data) from None
    if manifest.manifest_digest is None:
        raise _changed(path, "its own digest is missing", "the manifest that was published", data)
    own = _own_digest(manifest)
    if manifest.manifest_digest != own:
        raise IntegrityError(
            _CHANGED,
            f"{path} was changed: its digest is not that of its own text; nothing was loaded",
            facts=[("expected", f"sha256:{manifest.manifest_digest}"), ("found", f"sha256:{own}")],
            remedy=_again(path),
        )
    return manifest


def _changed(path: Path, problem: str, expected: str, data: bytes) -> IntegrityError:
    return IntegrityError(
        _CHANGED,
        f"{path} is not an adapter's manifest: {problem}; nothing was loaded",
        facts=[("expected", expected), ("found", f"sha256:{hashlib.sha256(data).hexdigest()}")],
        remedy=_again(path),
    )


def _again(path: Path) -> str:
    run = path.parent.parent if path.parent.name == PUBLISHED else path.parent
    return (
        f"Publish the adapter again (`vox-host train --resume {quoted(run)}`), or take it from where it came."
    )


def _own_digest(manifest: AdapterManifest) -> str:
    text = _text(manifest.model_copy(update={"manifest_digest": None}))
    return hashlib.sha256(text.encode()).hexdigest()


def _text(manifest: AdapterManifest) -> str:
    return json.dumps(manifest.model_dump(mode="json"), indent=1, ensure_ascii=False, sort_keys=True) + "\n"
