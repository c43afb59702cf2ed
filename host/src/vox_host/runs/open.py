"""From a path to an `AdapterSource`: what is there, whose layout it has, whether its bytes are right."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from vox_host.errors import IntegrityError, ModelError, UsageError, VoxError
from vox_host.quoted import quoted
from vox_host.runs.layout import (
    ADAPTER_CONFIG,
    ADAPTER_MANIFEST,
    ADAPTER_MODEL,
    CHAT_TEMPLATE,
    CHECKPOINTS,
    PUBLISHED,
    RUN_JSON,
)
from vox_host.runs.manifest import MANIFEST_KIND, AdapterManifest, parse_manifest
from vox_host.runs.older_layout import read_older_folder
from vox_host.runs.peft_folder import read_peft_folder
from vox_host.runs.source import AdapterSource
from vox_plugin_api.adapter_keys import adapter_keys
from vox_plugin_api.strict_json import CheckpointError, parse_json_object

__all__ = ["READERS", "is_adapter_folder", "open_adapter", "refuse_special_files", "read_verified"]

Reader = Callable[[Path], AdapterSource | None]
"""Reads a folder of a layout that is not ours; None: it isn't of that layout."""

READERS: tuple[Reader, ...] = (read_older_folder, read_peft_folder)

_WHOLE = (ADAPTER_MODEL, ADAPTER_CONFIG, ADAPTER_MANIFEST)

_TRIES = 20
"""How often a run is read again that someone publishes to meanwhile; a publish takes longer than a read."""


def is_adapter_folder(path: Path) -> bool:
    """Say whether `path` looks like a run or an adapter, whole or not."""
    names = (RUN_JSON, ADAPTER_MODEL, ADAPTER_CONFIG, ADAPTER_MANIFEST, PUBLISHED)
    return path.is_dir() and any((path / name).exists() for name in names)


def refuse_special_files(path: Path) -> None:
    """Refuse a folder with a pipe, a socket or a device in it: to read one may never end.

    Raises:
        ModelError: there is one.
    """
    for folder in (path, path / PUBLISHED):
        entries = sorted(folder.iterdir()) if folder.is_dir() else []
        for entry in entries:
            if entry.exists() and not (entry.is_file() or entry.is_dir()):
                raise ModelError(
                    "run-special-file",
                    f"{entry} is a pipe, a socket or a device; nothing was read",
                    facts=[("expected", "files and folders")],
                    remedy="Take it out of the folder.",
                )


def open_adapter(path: Path) -> AdapterSource:
    """Find the adapter in the folder `path`: a run's, or one of another layout.

    A run that is being trained has the adapter that was published last.

    Raises:
        UsageError: there is no such folder.
        ModelError: the folder has no adapter, or none yet; what is missing is named.
        IntegrityError: a file is not the one that was published, with both digests, or it is gone.
    """
    if not path.is_dir():
        raise UsageError(
            "run-not-found",
            f"{path} is not a folder; nothing was loaded",
            remedy="Name a run's directory, or a folder that holds an adapter.",
        )
    refuse_special_files(path)
    if _is_ours(path):
        return _open_run(path)
    for read in READERS:
        source = read(path)
        if source is not None:
            return source
    raise _incomplete(path)


def read_verified(path: Path) -> tuple[Path, AdapterManifest]:
    """Return where the adapter's three files are, and the manifest that each was held against.

    Raises:
        ModelError, IntegrityError: as `open_adapter`.
    """
    seen: tuple[Path, tuple[int, int] | None] | None = None
    for _ in range(_TRIES):
        folder = path / PUBLISHED if (path / PUBLISHED).is_dir() else path
        identity: tuple[int, int] | None = None
        expected: tuple[str, ...] = _WHOLE
        try:
            found = (folder / ADAPTER_MANIFEST).stat()
            # Not its bytes: the same adapter may be published again and again.
            identity = (found.st_ino, found.st_mtime_ns)
            manifest = parse_manifest((folder / ADAPTER_MANIFEST).read_bytes(), folder / ADAPTER_MANIFEST)
            expected = tuple(manifest.files)
            _verify(path, folder, manifest)
        except (VoxError, OSError) as error:
            if folder != path and not folder.is_dir():
                # Someone who publishes took its files out meanwhile.
                seen = None
                continue
            # The same manifest twice in the same place: it is not that someone publishes meanwhile.
            if seen == (folder, identity):
                if isinstance(error, VoxError):
                    raise
                raise _unreadable(path, expected, error) from None
            seen = (folder, identity)
            continue
        return folder, manifest
    raise ModelError(
        "run-busy",
        f"{path} changed each of the {_TRIES} times that it was read; nothing was loaded",
        remedy="Try again.",
    )


def _is_ours(path: Path) -> bool:
    """Say whether the folder is a run's; the older layout has a manifest of the same name."""
    if (path / RUN_JSON).exists() or (path / PUBLISHED).is_dir():
        return True
    try:
        data = (path / ADAPTER_MANIFEST).read_bytes()
        fields = parse_json_object(data, source=ADAPTER_MANIFEST, code="adapter-manifest-changed")
    except OSError:
        return False
    except CheckpointError:
        # Damaged; if the adapter has the name that we give it, its manifest was ours.
        return (path / ADAPTER_MODEL).exists()
    return fields.get("kind") == MANIFEST_KIND


def _open_run(path: Path) -> AdapterSource:
    folder, manifest = read_verified(path)
    template = None
    if CHAT_TEMPLATE in manifest.files:
        try:
            template = (path / CHAT_TEMPLATE).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise ModelError(
                "chat-template-encoding",
                f"{path / CHAT_TEMPLATE} is not UTF-8 text (byte {error.start}); nothing was loaded",
                remedy="Save it as UTF-8, or take it from where the adapter came.",
            ) from None
    keys = [key for layer in manifest.layer_order for key in adapter_keys(layer)]
    return AdapterSource(
        folder=path,
        origin="run",
        file=folder / ADAPTER_MODEL,
        sha256=manifest.files[ADAPTER_MODEL].sha256,
        config=manifest.config,
        key_map={key: key for key in keys},
        base_name=manifest.base_model.name,
        base_digest=manifest.base_model.digest,
        adapter_digest=manifest.adapter_digest,
        chat_template=template,
    )


def _verify(path: Path, folder: Path, manifest: AdapterManifest) -> None:
    for name in (ADAPTER_MODEL, ADAPTER_CONFIG):
        if name not in manifest.files:
            raise IntegrityError(
                "adapter-manifest-changed",
                f"{folder / ADAPTER_MANIFEST} has no digest of {name}; nothing was loaded",
                facts=[("expected", f"a digest of {name}"), ("found", sorted(manifest.files))],
                remedy=f"`vox-host train --resume {quoted(path)}` publishes it again.",
            )
    for name, record in manifest.files.items():
        file = (folder if name in (ADAPTER_MODEL, ADAPTER_CONFIG) else path) / name
        with file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != record.sha256:
            raise IntegrityError(
                "adapter-changed",
                f"{file} is not the file that was published; nothing was loaded",
                facts=[
                    ("file", str(file)),
                    ("expected", f"sha256:{record.sha256}"),
                    ("found", f"sha256:{found}"),
                ],
                remedy=_put_back(path, name),
            )


def _put_back(path: Path, name: str) -> str:
    if not (path / RUN_JSON).exists():
        return "Take it from where it came."
    resume = f"`vox-host train --resume {quoted(path)}`"
    if name == CHAT_TEMPLATE:
        # An edit of it may be meant: a run goes on with the one of then, and overwrites no other unasked.
        return f"`rm {quoted(path / name)}`, then {resume} puts back the one that trained."
    return f"{resume} puts it back."


def _unreadable(path: Path, expected: Sequence[str], error: OSError) -> VoxError:
    if isinstance(error, FileNotFoundError):
        return _incomplete(path, expected)
    return ModelError(
        "run-unreadable",
        f"{error.filename or path} can't be read: {error.strerror or error}; nothing was loaded",
        facts=[("path", str(error.filename or path))],
        remedy="Allow this user to read it.",
    )


def _incomplete(path: Path, expected: Sequence[str] = _WHOLE) -> VoxError:
    missing = [name for name in expected if not (path / name).exists()]
    facts = [("missing", missing), ("found", sorted(p.name for p in path.iterdir())[:20])]
    is_run = (path / RUN_JSON).exists()
    resume = f"`vox-host train --resume {quoted(path)}`"
    is_published = any((path / name).exists() for name in (*_WHOLE, PUBLISHED))
    if (is_run and is_published) or expected is not _WHOLE:
        # It was whole once: these three change as one, and the manifest names what else belongs to them.
        return IntegrityError(
            "run-incomplete",
            f"{path} lacks {', '.join(missing)}, which its adapter was published with; nothing was loaded",
            facts=facts,
            remedy=f"{resume} puts back what is missing." if is_run else "Take it from where it came.",
        )
    has_saved = any((path / CHECKPOINTS).glob("step-*"))
    what = "has no adapter yet" if is_run else "holds no adapter that can be read"
    goes_on = "publishes that of its checkpoints" if has_saved else "goes on to its first checkpoint"
    return ModelError(
        "run-incomplete",
        f"{path} {what}; nothing was loaded",
        facts=facts,
        remedy=f"{resume} {goes_on}."
        if is_run
        else "Name a run's directory, or a folder with adapter_model.safetensors and adapter_config.json.",
    )
