"""Publish an adapter: three files that change as one.

    1. adapter, PEFT's configuration and manifest are written into `.publishing`, each flushed;
    2. `.publishing` is renamed to `.published`: from here on the new adapter is the run's;
    3. each file is linked and renamed over the old one, and `.published` goes.

A reader takes the files from `.published` while that is there. So at every moment the run has
one whole adapter: until step 2 the old one, and from then on the new one, although PEFT itself,
which knows nothing of `.published`, finds the new one only after step 3. A publish that was
killed after step 2 is brought to its end by `settle`, which the next publish begins with.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
from pathlib import Path

from vox_host.errors import IntegrityError, UsageError
from vox_host.quoted import quoted
from vox_host.runs.adapter_config import peft_config_text
from vox_host.runs.layout import (
    ADAPTER_CONFIG,
    ADAPTER_MANIFEST,
    ADAPTER_MODEL,
    BESIDE,
    CHECKPOINT_ADAPTER,
    PUBLISHED,
    RunDirectory,
)
from vox_host.runs.manifest import AdapterFacts, AdapterManifest, FileRecord, manifest_text
from vox_plugin_api.unwritten import errno_name, what_helps

__all__ = ["publish_adapter", "settle"]

_ASIDE = ".publishing"
_CHUNK = 1 << 20
# The manifest last: to readers that look at nothing else, it says what is there.
_FILES = (ADAPTER_MODEL, ADAPTER_CONFIG, ADAPTER_MANIFEST)


def publish_adapter(
    run: RunDirectory, checkpoint: Path, facts: AdapterFacts, *, sha256: str | None = None
) -> AdapterManifest:
    """Make the adapter of a checkpoint the run's, and return the manifest that was written.

    One at a time: whoever trains holds the run.

    Args:
        checkpoint: a folder that `train_save` wrote.
        facts: what is true of that checkpoint's adapter.
        sha256: of the checkpoint's file, where it is known (`TrainSaveResult.files`).

    Raises:
        IntegrityError: the checkpoint's file is not the one of that digest; nothing changed.
        UsageError: `publish-failed`: the disk is full or can't be written, and the run has the
            adapter it had; `publish-unfinished`: it has the new one, in `.published`.
    """
    settle(run)
    aside = run.path / _ASIDE
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        manifest = _write(run, aside, checkpoint / CHECKPOINT_ADAPTER, facts, sha256)
        _sync_folder(aside)
        aside.rename(run.path / PUBLISHED)
        _sync_folder(run.path)
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        raise UsageError(
            "publish-failed",
            f"the adapter of {checkpoint} can't be published: {error.strerror or error}; {run.path} has the "
            "adapter that it had",
            facts=[("path", str(error.filename or run.path)), ("errno", errno_name(error))],
            remedy=_goes_on(run, error),
        ) from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    settle(run)
    return manifest


def settle(run: RunDirectory) -> None:
    """Bring a publish that was cut short to its end; nothing happens where there was none.

    Raises:
        UsageError: `publish-unfinished`: the disk is full or can't be written.
    """
    published, aside = run.path / PUBLISHED, run.path / _ASIDE
    if not published.is_dir():
        return
    try:
        for name in _FILES:
            _replace(published / name, run.path / name)
        _sync_folder(run.path)
        # Gone for readers at once; what is left of it under the other name is in nobody's way.
        shutil.rmtree(aside, ignore_errors=True)
        published.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            "publish-unfinished",
            f"the files of the new adapter can't be put into place: {error.strerror or error}; it is whole "
            f"in {published}, and vox-host reads it from there",
            facts=[("path", str(error.filename or run.path)), ("errno", errno_name(error))],
            remedy=_goes_on(run, error),
        ) from error


def _goes_on(run: RunDirectory, error: OSError) -> str:
    return f"{what_helps(errno_name(error))}, then `vox-host train --resume {quoted(run.path)}` goes on."


def _write(
    run: RunDirectory, aside: Path, adapter: Path, facts: AdapterFacts, sha256: str | None
) -> AdapterManifest:
    files = {ADAPTER_MODEL: _copy(adapter, aside / ADAPTER_MODEL)}
    found = files[ADAPTER_MODEL].sha256
    if sha256 is not None and found != sha256:
        raise IntegrityError(
            "checkpoint-changed",
            f"{adapter} is not the file that the worker saved; {run.path} has the adapter that it had",
            facts=[("expected", f"sha256:{sha256}"), ("found", f"sha256:{found}")],
            remedy=f"`rm -r {quoted(adapter.parent)}`, then `vox-host train --resume {quoted(run.path)}` "
            "goes on from the checkpoint before it.",
        )
    files[ADAPTER_CONFIG] = _put(aside / ADAPTER_CONFIG, peft_config_text(facts).encode())
    for name in BESIDE:
        with contextlib.suppress(FileNotFoundError):
            files[name] = _record((run.path / name).read_bytes())
    manifest = AdapterManifest(**facts.model_dump(), files=dict(sorted(files.items())))
    _put(aside / ADAPTER_MANIFEST, manifest_text(manifest).encode())
    return manifest


def _copy(source: Path, target: Path) -> FileRecord:
    digest, size = hashlib.sha256(), 0
    with source.open("rb") as reading, target.open("xb") as writing:
        while chunk := reading.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
            writing.write(chunk)
        writing.flush()
        os.fsync(writing.fileno())
    return FileRecord(sha256=digest.hexdigest(), size_bytes=size)


def _put(path: Path, content: bytes) -> FileRecord:
    with path.open("xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return _record(content)


def _record(content: bytes) -> FileRecord:
    return FileRecord(sha256=hashlib.sha256(content).hexdigest(), size_bytes=len(content))


def _replace(source: Path, target: Path) -> None:
    """Make `target` the file `source`, which stays where it is: readers take it from there till the end."""
    link = target.with_name(f".{target.name}.new")
    link.unlink(missing_ok=True)
    try:
        link.hardlink_to(source)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV):
            raise
        _copy(source, link)  # a disk without hard links
    link.replace(target)
    # Renaming one name of a file over another of the same does nothing and leaves both.
    link.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
