"""The models of the store: list them, find one, remove one.

A directory of the store is a model when its model-manifest.json holds and every file it lists
is there in its full size. One that isn't is listed all the same, with what is wrong with it.
"""

from __future__ import annotations

import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_host.errors import IntegrityError, ModelError, UsageError
from vox_host.integrity import StatCache
from vox_host.models.model_manifest import MODEL_MANIFEST, ModelManifest, read_manifest
from vox_host.models.safetensors_write import Progress, copy_hashed
from vox_plugin_api.checkpoint import CheckpointError, read_json_object
from vox_plugin_api.families import parse_config

__all__ = ["BrokenModel", "Catalogue", "InstalledModel", "check_name", "note_as_verified", "verify_files"]

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._-]{0,126}[a-z0-9])?")

_IMPORT_AGAIN = "`vox-host model remove {}`, then import it again."


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


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenModel:
    """A directory of the store that can't be used."""

    name: str
    path: Path
    code: str
    problem: str
    missing: tuple[str, ...] = ()
    """Files that are lost or cut."""


def check_name(name: str) -> str:
    """Return `name` if it can name a model.

    Raises:
        UsageError: it can't.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            "model-name",
            f"{name!r:.200} cannot name a model; nothing was done",
            remedy="A name has small letters, digits and . _ - inside, at most 128 in all.",
        )
    return name


class Catalogue:
    """The models in one directory, which may not exist yet."""

    def __init__(self, models_dir: Path) -> None:
        self.models_dir = models_dir

    def list(self) -> list[InstalledModel | BrokenModel]:
        """Return every entry, sorted by name. Reads manifests and file sizes, no weight."""
        if not self.models_dir.is_dir():
            return []
        paths = sorted(self.models_dir.iterdir(), key=lambda path: path.name)
        return [_read_entry(path) for path in paths if path.is_dir() and not path.name.startswith(".")]

    def find(self, name: str) -> InstalledModel:
        """Return the model `name`.

        Raises:
            UsageError: there is none of that name.
            ModelError: there is, but it is broken.
        """
        check_name(name)
        path = self.models_dir / name
        if not path.is_dir():
            known = [entry.name for entry in self.list()]
            raise UsageError(
                "model-not-found",
                f"no model is named {name!r}; nothing was started",
                facts=[("store", str(self.models_dir)), ("models", known)],
                remedy="`vox-host model import` adds one; `vox-host model list` shows what is there.",
            )
        entry = _read_entry(path)
        if isinstance(entry, BrokenModel):
            raise ModelError(
                entry.code,
                f"model {name!r} cannot be used: {entry.problem}",
                facts=[("path", str(path)), ("missing", list(entry.missing))],
                remedy=f"`vox-host model remove {name}`, then import it again.",
            )
        return entry

    def remove(self, name: str) -> Path:
        """Delete the model `name`, broken or not, and return where it was.

        Raises:
            UsageError: there is none of that name.
        """
        check_name(name)
        path = self.models_dir / name
        if not path.is_dir() or path.is_symlink():
            raise UsageError(
                "model-not-found", f"no model is named {name!r} in {self.models_dir}; nothing was removed"
            )
        # Out of sight first: a removal that is cut short leaves no half model behind.
        hidden = self.models_dir / f".removed-{uuid.uuid4().hex}"
        path.rename(hidden)
        _checked_path(path).unlink(missing_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)
        return path


def verify_files(model: InstalledModel, progress: Progress, *, trust_unchanged: bool = False) -> None:
    """Read every file of `model` and compare it with what was imported.

    With `trust_unchanged`, a file whose size, times and inode are those of the last check is
    taken to hold what it held then.

    Raises:
        IntegrityError: a file differs, or one was added that a reader could take for the model's.
    """
    manifest = read_manifest(model.path / MODEL_MANIFEST)
    _refuse_added(model, manifest)
    cache = StatCache.load(_checked_path(model.path), manifest.digest)
    total = sum(record.size_bytes for record in manifest.files.values())
    done = 0
    for name, record in manifest.files.items():
        path = model.path / name
        info = path.stat()
        found = cache.lookup(path, info) if trust_unchanged else None
        if found is None:
            found = copy_hashed(path, None, step="verifying", progress=progress, done=done, total=total)
            cache.remember(path, info, found)
        done += record.size_bytes
        if found != record.sha256:
            raise IntegrityError(
                "model-digest",
                f"{name} of model {model.name!r} is not what was imported; nothing was started",
                facts=[
                    ("file", str(path)),
                    ("expected", f"sha256:{record.sha256}"),
                    ("found", f"sha256:{found}"),
                ],
                remedy=_IMPORT_AGAIN.format(model.name),
            )
    cache.save()


def note_as_verified(model: InstalledModel) -> None:
    """Record the files of `model`, just written and hashed, as checked, so that its first use needn't."""
    manifest = read_manifest(model.path / MODEL_MANIFEST)
    cache = StatCache.load(_checked_path(model.path), manifest.digest)
    for name, record in manifest.files.items():
        path = model.path / name
        cache.remember(path, path.stat(), record.sha256)
    cache.save()


def _checked_path(model_dir: Path) -> Path:
    return model_dir.with_name(f".checked-{model_dir.name}.json")


def _refuse_added(model: InstalledModel, manifest: ModelManifest) -> None:
    # An added model.safetensors would be read before recorded shards, a template before the recorded one.
    read_by_name = (".safetensors", ".json", ".jinja")
    for path in sorted(model.path.iterdir()):
        if path.suffix in read_by_name and path.name not in manifest.files and path.name != MODEL_MANIFEST:
            raise IntegrityError(
                "model-file-added",
                f"{path.name} was added to model {model.name!r} after its import; nothing was started",
                facts=[("file", str(path)), ("expected", "no such file")],
                remedy=f"Delete the file; or {_IMPORT_AGAIN.format(model.name)}",
            )


def _read_entry(path: Path) -> InstalledModel | BrokenModel:
    if not (path / MODEL_MANIFEST).exists():
        return BrokenModel(
            name=path.name,
            path=path,
            code="model-incomplete",
            problem=f"{MODEL_MANIFEST} is missing: it was not imported, or not to the end",
            missing=(MODEL_MANIFEST,),
        )
    try:
        manifest = read_manifest(path / MODEL_MANIFEST)
        problems = _file_problems(path, manifest)
        config = {} if problems else read_json_object(path / "config.json")
    except (ModelError, CheckpointError) as error:
        return BrokenModel(name=path.name, path=path, code=error.code, problem=error.message)
    if problems:
        text = "; ".join(list(problems.values())[:5])
        return BrokenModel(
            name=path.name, path=path, code="model-incomplete", problem=text, missing=tuple(problems)
        )
    weights = [r.size_bytes for name, r in manifest.files.items() if name.endswith(".safetensors")]
    return InstalledModel(
        name=path.name,
        path=path,
        digest=manifest.digest,
        architecture=manifest.architecture,
        context_length=_context_length(config),
        size_bytes=sum(weights),
        license=manifest.license.id,
        license_terms=manifest.license.terms,
        imported_at=manifest.imported_at,
        source=manifest.source,
    )


def _context_length(config: dict[str, Any]) -> int | None:
    # A family that is not known here, or a config that a plugin will refuse: nothing to show.
    try:
        return parse_config(config).context_length
    except CheckpointError:
        return None


def _file_problems(path: Path, manifest: ModelManifest) -> dict[str, str]:
    problems: dict[str, str] = {}
    for name, record in manifest.files.items():
        try:
            found = (path / name).stat().st_size
        except OSError:
            problems[name] = f"{name} is missing"
            continue
        if found != record.size_bytes:
            problems[name] = f"{name} has {found} bytes where {record.size_bytes} were imported"
    return problems
