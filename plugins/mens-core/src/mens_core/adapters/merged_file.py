"""Write a checkpoint's weights piece by piece into a folder that is whole or not there."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import canonical_json
from vox_plugin_api.unwritten import errno_name, what_helps

__all__ = ["QUANT_METADATA", "WEIGHTS", "Buffer", "Piece", "write_weights"]

WEIGHTS = "model.safetensors"
QUANT_METADATA = "quant-metadata.json"

Buffer = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the file to be written, and what makes its bytes."""

    name: str
    dtype: str
    """The header's word: "F32", "BF16", "U8" ..."""
    shape: tuple[int, ...]
    nbytes: int
    parts: Callable[[], Iterator[Buffer]]
    """Its bytes in order, in buffers of a few MiB; made when its turn comes."""
    source: str | None = None
    """The tensor of the base whose bytes these are; None: they are made."""


def write_weights(
    folder: Path, pieces: Sequence[Piece], quant_metadata: Mapping[str, object] | None
) -> Generator[None, None, dict[str, str]]:
    """Write `folder`, which must not exist, yielding after each part; return each file's SHA-256.

    Raises:
        BackendError: `folder-exists`, `save-failed` with the system's reason, or what a part raised;
            nothing is at `folder`.
    """
    if folder.exists() or folder.is_symlink():
        raise BackendError(
            "folder-exists",
            f"{folder} exists; nothing was written, since a merge never replaces anything",
            facts={"folder": str(folder)},
            remedy="Name a folder that isn't there yet.",
        )
    aside = folder.with_name(f".{folder.name}.partial")
    is_done = False
    try:
        # What a merge that was killed left behind.
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        digests = {}
        with (aside / WEIGHTS).open("xb") as file:
            digests[WEIGHTS] = yield from _write_pieces(file, pieces)
        if quant_metadata is not None:
            content = canonical_json(dict(quant_metadata))
            digests[QUANT_METADATA] = hashlib.sha256(content).hexdigest()
            with (aside / QUANT_METADATA).open("xb") as file:
                file.write(content)
                _flush(file)
        _sync_folder(aside)
        aside.rename(folder)
        is_done = True
        _sync_folder(folder.parent)
    except OSError as error:
        raise BackendError(
            "save-failed",
            f"{folder} can't be written: {error.strerror or error}; it is not there",
            facts={
                "folder": str(folder),
                "bytes": sum(piece.nbytes for piece in pieces),
                "errno": errno_name(error),
            },
            remedy=f"{what_helps(errno_name(error))} or name another folder, and repeat the command.",
        ) from error
    finally:
        # Also when the request is cancelled between two parts.
        if not is_done:
            shutil.rmtree(aside, ignore_errors=True)
    return digests


def _write_pieces(file: BinaryIO, pieces: Sequence[Piece]) -> Generator[None, None, str]:
    digest = hashlib.sha256()

    def put(part: Buffer) -> None:
        file.write(part)
        digest.update(part)

    put(_header(pieces))
    for piece in pieces:
        written = 0
        for part in piece.parts():
            put(part)
            written += len(part)
            yield None
        if written != piece.nbytes:
            raise AssertionError(f"{piece.name}: {written} bytes were made, {piece.nbytes} announced")
    _flush(file)
    return digest.hexdigest()


def _header(pieces: Sequence[Piece]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for piece in pieces:
        header[piece.name] = {
            "dtype": piece.dtype,
            "shape": list(piece.shape),
            "data_offsets": [at, at + piece.nbytes],
        }
        at += piece.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    # Readers map the file and want the data on a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
