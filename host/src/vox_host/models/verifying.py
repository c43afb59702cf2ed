"""Hold a model's files against what was recorded at its import, byte by byte."""

from __future__ import annotations

from pathlib import Path

from vox_host.errors import IntegrityError
from vox_host.models.installed import InstalledModel, added_files, checked_path
from vox_host.models.model_manifest import MODEL_MANIFEST, ModelManifest, read_manifest
from vox_host.models.safetensors_write import Progress, copy_hashed
from vox_host.stat_cache import StatCache

__all__ = ["note_as_verified", "verify_files"]

_IMPORT_AGAIN = "`vox-host model remove {}`, then import it again."


def verify_files(model: InstalledModel, progress: Progress, *, trust_unchanged: bool = False) -> int:
    """Read every file of `model` and compare it with what was imported.

    With `trust_unchanged`, a file whose size, times and inode are those of the last check is
    taken to hold what it held then. Returns how many files there are.

    Raises:
        IntegrityError: a file differs, or one was added that a reader could take for the model's.
    """
    manifest = read_manifest(model.path / MODEL_MANIFEST)
    _refuse_added(model, manifest)
    cache = StatCache.load(checked_path(model.path), manifest.digest)
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
    return len(manifest.files)


def note_as_verified(model_dir: Path) -> None:
    """Record the files in `model_dir`, just written and hashed, as checked, for the first use."""
    manifest = read_manifest(model_dir / MODEL_MANIFEST)
    cache = StatCache.load(checked_path(model_dir), manifest.digest)
    for name, record in manifest.files.items():
        path = model_dir / name
        cache.remember(path, path.stat(), record.sha256)
    cache.save()


def _refuse_added(model: InstalledModel, manifest: ModelManifest) -> None:
    for name in added_files(model.path, manifest):
        raise IntegrityError(
            "model-file-added",
            f"{name} was added to model {model.name!r} after its import; nothing was started",
            facts=[("file", str(model.path / name)), ("expected", "no such file")],
            remedy=f"Delete the file; or {_IMPORT_AGAIN.format(model.name)}",
        )
