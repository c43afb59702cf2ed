"""Write a safetensors file from pieces of other files, one buffer at a time."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Piece", "Progress", "copy_hashed", "header_bytes", "write_safetensors"]

BUFFER_BYTES = 4 * 1024 * 1024

Progress = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the file to be written, and where its bytes come from."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the source."""
    nbytes: int


def header_bytes(pieces: Sequence[Piece]) -> bytes:
    """Return length and header of a file that holds `pieces` one after the other."""
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


def write_safetensors(
    target: Path, source: Path, pieces: Sequence[Piece], *, step: str, progress: Progress
) -> str:
    """Write `pieces` of `source` to the new file `target`, flush it, and return its SHA-256."""
    digest = hashlib.sha256()
    total = sum(piece.nbytes for piece in pieces)
    done = 0
    with source.open("rb", buffering=0) as reading, target.open("xb") as writing:
        header = header_bytes(pieces)
        writing.write(header)
        digest.update(header)
        for piece in pieces:
            reading.seek(piece.offset)
            for part in _parts(reading.readinto, piece.nbytes, source):
                writing.write(part)
                digest.update(part)
                done += len(part)
                progress(step, done, total)
        writing.flush()
        os.fsync(writing.fileno())
    return digest.hexdigest()


def copy_hashed(
    source: Path,
    target: Path | None,
    *,
    step: str,
    progress: Progress,
    done: int = 0,
    total: int | None = None,
) -> str:
    """Copy `source` to the new file `target`, flush it, and return the SHA-256; None: only read.

    Args:
        done: bytes of this step that were done before.
        total: bytes of this step in all; None: the size of `source`.
    """
    digest = hashlib.sha256()
    size = source.stat().st_size
    with source.open("rb", buffering=0) as reading:
        writing = target.open("xb") if target is not None else None
        try:
            for part in _parts(reading.readinto, size, source):
                if writing is not None:
                    writing.write(part)
                digest.update(part)
                done += len(part)
                progress(step, done, size if total is None else total)
            if writing is not None:
                writing.flush()
                os.fsync(writing.fileno())
        finally:
            if writing is not None:
                writing.close()
    return digest.hexdigest()


def _parts(readinto: Callable[[memoryview], int | None], count: int, source: Path) -> Iterable[memoryview]:
    """Yield `count` bytes in one buffer that is used again and again."""
    buffer = memoryview(bytearray(min(BUFFER_BYTES, count)))
    while count:
        got = readinto(buffer[: min(len(buffer), count)])
        if not got:
            raise OSError(f"{source} became shorter while it was read")
        yield buffer[:got]
        count -= got
