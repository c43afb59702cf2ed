"""Write a GGUF file, version 3: metadata, then tensors whose bytes are copied from other files."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vox_host.models.safetensors_write import BUFFER_BYTES, Progress

__all__ = ["Array", "Float32", "GgufPiece", "UInt32", "Value", "write_gguf"]

ALIGNMENT = 32
_VERSION = 3
TYPE_NUMBERS: Mapping[str, int] = {
    "F32": 0,
    "F16": 1,
    "q4_0": 2,
    "q5_0": 6,
    "q8_0": 8,
    "q4_k": 12,
    "q5_k": 13,
    "q6_k": 14,
    "BF16": 30,
}
"""GGML's number of each type, by the word that a checkpoint has for it."""


@dataclass(frozen=True, slots=True)
class UInt32:
    """A whole number."""

    value: int


@dataclass(frozen=True, slots=True)
class Float32:
    """A number, rounded to float32."""

    value: float


@dataclass(frozen=True, slots=True)
class Array:
    """Values of one kind: "string", "float32" or "int32"."""

    kind: str
    values: Sequence[str | float | int]


Value = str | bool | UInt32 | Float32 | Array


@dataclass(frozen=True, slots=True)
class GgufPiece:
    """A tensor, and where its bytes are."""

    name: str
    type: str
    """A key of `TYPE_NUMBERS`."""
    shape: tuple[int, ...]
    """Row-major, as everywhere here; the file has it the other way round."""
    file: Path
    offset: int
    nbytes: int
    is_turned: bool = False
    """The source has its columns one after the other: `shape` is its shape the other way round."""


def write_gguf(
    target: Path, metadata: Mapping[str, Value], pieces: Sequence[GgufPiece], progress: Progress
) -> None:
    """Write the new file `target` and flush it.

    Raises:
        OSError: it can't be written, or a source became shorter.
    """
    header = [b"GGUF", struct.pack("<IQQ", _VERSION, len(pieces), len(metadata))]
    for key, value in metadata.items():
        header += [_text(key), _typed(value)]
    at = 0
    for piece in pieces:
        dimensions = struct.pack(f"<{len(piece.shape)}Q", *reversed(piece.shape))
        header += [
            _text(piece.name),
            struct.pack("<I", len(piece.shape)),
            dimensions,
            struct.pack("<IQ", TYPE_NUMBERS[piece.type], at),
        ]
        at += piece.nbytes + _padding(piece.nbytes)
    start = b"".join(header)
    total = sum(piece.nbytes for piece in pieces)
    done = 0
    with target.open("xb") as writing:
        writing.write(start + bytes(_padding(len(start))))
        for piece in pieces:
            for part in _parts(piece):
                writing.write(part)
                done += len(part)
                progress("writing", done, total)
            writing.write(bytes(_padding(piece.nbytes)))
        writing.flush()
        os.fsync(writing.fileno())


def _parts(piece: GgufPiece) -> Iterator[bytes | bytearray]:
    with piece.file.open("rb") as reading:
        reading.seek(piece.offset)
        left = piece.nbytes
        while left:
            part = reading.read(left if piece.is_turned else min(BUFFER_BYTES, left))
            if not part or (piece.is_turned and len(part) < left):
                raise OSError(f"{piece.file} became shorter while it was read")
            yield _turned(part, *piece.shape) if piece.is_turned else part
            left -= len(part)


def _turned(data: bytes, rows: int, columns: int) -> bytearray:
    """Rows of a matrix whose columns are given; elements are moved as they are."""
    size = len(data) // (rows * columns)
    made = bytearray(len(data))
    for column in range(columns):
        one = data[column * rows * size : (column + 1) * rows * size]
        for byte in range(size):
            made[column * size + byte :: columns * size] = one[byte::size]
    return made


def _padding(size: int) -> int:
    return -size % ALIGNMENT


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


_KINDS: Mapping[str, tuple[int, str]] = {"int32": (5, "i"), "float32": (6, "f")}


def _typed(value: Value) -> bytes:
    match value:
        case bool():
            return struct.pack("<I?", 7, value)
        case str():
            return struct.pack("<I", 8) + _text(value)
        case UInt32():
            return struct.pack("<II", 4, value.value)
        case Float32():
            return struct.pack("<If", 6, value.value)
        case Array(kind="string"):
            texts = b"".join(_text(str(item)) for item in value.values)
            return struct.pack("<IIQ", 9, 8, len(value.values)) + texts
        case Array():
            number, letter = _KINDS[value.kind]
            count = len(value.values)
            return struct.pack(f"<IIQ{count}{letter}", 9, number, count, *value.values)
