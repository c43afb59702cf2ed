"""What a directory of the store is: a model that is complete, or what is wrong with it.

It is a model when its model-manifest.json holds and every file it lists is there in its full
size. Reads the manifest, the config and what `stat` says, no weight: what was touched since its
last check is said to be changed, and `verifying` tells whether its bytes are.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vox_host.errors import IntegrityError, ModelError, VoxError
from vox_host.models.model_manifest import MODEL_MANIFEST, MergedFrom, ModelManifest, read_manifest
from vox_host.stat_cache import StatCache
from vox_plugin_api.checkpoint import CheckpointError, read_json_object
from vox_plugin_api.families import parse_config

__all__ = ["BrokenModel", "InstalledModel", "added_files", "checked_path", "read_entry"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InstalledModel:
    """A model that is complete."""

    name: str
    path: Path
    digest: str
    architecture: str
    context_length: int | None
    """Positions the model was made for; None: of a family that is not known here."""
    size_bytes: int
    """Of the weights inside."""
    license: str
    license_terms: str
    """Where its text can be read."""
    imported_at: str
    source: dict[str, Any]
    """Where it came from: kind, file, sha256."""
    merged_from: MergedFrom | None = None
    """The base and the adapter that it was merged of, if it was."""
    state: Literal["ok", "changed", "unchecked"]
    """ok: no file was touched since its last check; changed: some were; unchecked: no check is on record."""
    touched: tuple[str, ...]
    """Files that were added, or touched since the last check, or that no check is on record for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenModel:
    """A directory of the store that can't be used."""

    name: str
    path: Path
    error: VoxError
    """What is wrong: an `IntegrityError` where files are not what was recorded."""
    missing: tuple[str, ...] = ()
    """Files that are lost or cut."""

    @property
    def code(self) -> str:
        return self.error.code

    @property
    def problem(self) -> str:
        return self.error.message


def read_entry(path: Path) -> InstalledModel | BrokenModel:
    """Say what the directory `path` of the store is."""
    if not (path / MODEL_MANIFEST).exists():
        error = ModelError(
            "model-incomplete",
            f"{MODEL_MANIFEST} is missing: it was not imported, or not to the end",
            remedy="Import the model again from its source.",
        )
        return BrokenModel(name=path.name, path=path, error=error, missing=(MODEL_MANIFEST,))
    try:
        manifest = read_manifest(path / MODEL_MANIFEST)
    except VoxError as error:
        return BrokenModel(name=path.name, path=path, error=error)
    problems = _file_problems(path, manifest)
    if problems:
        return _incomplete(path, manifest, problems)
    weights = [r.size_bytes for name, r in manifest.files.items() if name.endswith(".safetensors")]
    state, touched = _state(path, manifest)
    return InstalledModel(
        name=path.name,
        path=path,
        digest=manifest.digest,
        architecture=manifest.architecture,
        context_length=_context_length(path / "config.json"),
        size_bytes=sum(weights),
        license=manifest.license.id,
        license_terms=manifest.license.terms,
        imported_at=manifest.imported_at,
        source=manifest.source,
        merged_from=manifest.merged_from,
        state=state,
        touched=touched,
    )


def _state(
    path: Path, manifest: ModelManifest
) -> tuple[Literal["ok", "changed", "unchecked"], tuple[str, ...]]:
    """Say what `stat` tells against the last check, without reading a file of the model."""
    cache = StatCache.load(checked_path(path), manifest.digest)
    added = added_files(path, manifest)
    unknown, touched = [], []
    for name, record in manifest.files.items():
        file = path / name
        if not cache.knows(file):
            unknown.append(name)
        elif cache.lookup(file, file.stat()) != record.sha256:
            touched.append(name)
    if added or touched:
        return "changed", (*added, *touched)
    return ("unchecked" if unknown else "ok"), tuple(unknown)


def _context_length(config: Path) -> int | None:
    # A family that is not known here, or a config that a plugin will refuse: nothing to show.
    try:
        return parse_config(read_json_object(config)).context_length
    except CheckpointError:
        return None


def _file_problems(path: Path, manifest: ModelManifest) -> dict[str, str]:
    """Return what was found in place of each file that is lost or of another size."""
    problems: dict[str, str] = {}
    for name, record in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            problems[name] = "no such file"
            continue
        if found != record.size_bytes:
            problems[name] = f"{found} bytes"
    return problems


def _incomplete(path: Path, manifest: ModelManifest, problems: dict[str, str]) -> BrokenModel:
    lines = [
        f"{name} is missing"
        if found == "no such file"
        else f"{name} has {found} where {manifest.files[name].size_bytes} were imported"
        for name, found in problems.items()
    ]
    name, found = next(iter(problems.items()))
    record = manifest.files[name]
    error = IntegrityError(
        "model-incomplete",
        "; ".join(lines[:5]),
        facts=[
            ("file", str(path / name)),
            ("expected", f"sha256:{record.sha256}, {record.size_bytes} bytes"),
            ("found", found),
        ],
        remedy="Import the model again from its source.",
    )
    return BrokenModel(name=path.name, path=path, error=error, missing=tuple(problems))


def checked_path(model_dir: Path) -> Path:
    """Return where the record of a model's last check is: beside it."""
    return model_dir.with_name(f".checked-{model_dir.name}.json")


def added_files(model_dir: Path, manifest: ModelManifest) -> list[str]:
    """Name the files that a reader could take for the model's and that no import wrote."""
    # An added model.safetensors would be read before recorded shards, a template before the recorded one.
    read_by_name = (".safetensors", ".json", ".jinja")
    names = sorted(path.name for path in model_dir.iterdir() if path.suffix in read_by_name)
    return [name for name in names if name not in manifest.files and name != MODEL_MANIFEST]
