"""Read the header of a GGUF file, trusting nothing in it.

A file is: magic, version, counts; metadata as typed key-value pairs; a description of each
tensor; padding to the alignment; the tensors' bytes. Every count, length and offset is held
against the size the file really has before it is used, so a hostile file costs an error
message and no memory.
"""

from __future__ import annotations

import math
import mmap
import stat
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from vox_host.errors import ModelError
from vox_host.models.ggml_types import GGML_TYPES, OTHER_GGML_TYPES, GgmlType

__all__ = ["GgufFile", "GgufTensor", "read_gguf_header"]

MAX_KEY_BYTES = 65535
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 65536


_SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
)
_STRING = 8
_ARRAY = 9


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies and what it is."""

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    """Row-major as everywhere else, the last one contiguous: the reverse of the file's order."""
    offset: int
    """Of its first byte, from the beginning of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file whose header was checked. Arrays are lists of str, or `array.array`s of numbers."""

    path: Path
    size_bytes: int
    metadata: Mapping[str, Any]
    tensors: tuple[GgufTensor, ...]


def read_gguf_header(path: Path) -> GgufFile:
    """Read and check the header of `path`.

    Raises:
        ModelError: the file is something else, is cut, or its header doesn't fit it.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ModelError(
                "gguf-invalid",
                f"{path} is not a regular file; nothing was imported",
                remedy="Name the GGUF file itself.",
            )
        size = status.st_size
        with path.open("rb") as file:
            if size < 24:
                raise _Reader(b"", path).error(
                    0, "file", f"has {size} bytes and is truncated: a GGUF header has at least 24"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _read(_Reader(data, path))
    except OSError as error:
        raise ModelError(
            "gguf-unreadable",
            f"{path} cannot be read: {error.strerror}",
            remedy="Allow this user to read it.",
        ) from None


class _Reader:
    """A cursor over the file's bytes that never leaves them."""

    def __init__(self, data: mmap.mmap | bytes, path: Path) -> None:
        self.data = data
        self.path = path
        self.at = 0

    def error(self, at: int, field: str, problem: str) -> ModelError:
        return ModelError(
            "gguf-invalid",
            f"{self.path}: {field} at byte {at} {problem}; nothing was imported",
            facts=[("file", str(self.path)), ("field", field), ("byte", at)],
            remedy="Fetch the file again: this one is damaged, was cut, or isn't GGUF.",
        )

    @property
    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, count: int, field: str) -> bytes:
        if count > self.left:
            raise self.error(
                self.at, field, f"needs {count} bytes and {self.left} are left: the file is truncated"
            )
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken

    def number(self, code: str, field: str) -> Any:
        layout = "<" + code
        return struct.unpack(layout, self.take(struct.calcsize(layout), field))[0]

    def string(self, field: str) -> str:
        at = self.at
        length = self.number("Q", field)
        if length > self.left:
            raise self.error(
                at, field, f"is declared with {length} bytes and {self.left} are left: the file is truncated"
            )
        try:
            return self.take(length, field).decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(at, field, "is not UTF-8") from None


def _read(reader: _Reader) -> GgufFile:
    magic = reader.take(4, "magic")
    if magic != b"GGUF":
        raise reader.error(0, "magic", f"is {magic.decode('latin-1')!r}; a GGUF file has 'GGUF'")
    version = reader.number("I", "version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version:
            raise reader.error(4, "version", "is written big-endian, which is not read here")
        raise reader.error(4, "version", f"is {version}; versions 2 and 3 are read")
    tensor_count = reader.number("Q", "tensor count")
    pair_count = reader.number("Q", "metadata count")
    # The shortest possible pair and description bound what the counts can honestly be.
    for field, at, count, least in (
        ("tensor count", 8, tensor_count, 32),
        ("metadata count", 16, pair_count, 13),
    ):
        if count * least > reader.left:
            raise reader.error(at, field, f"is {count}, but only {reader.left} bytes follow: truncated")
    metadata = _metadata(reader, pair_count)
    alignment = metadata.get("general.alignment", 32)
    described = _descriptions(reader, tensor_count)
    data_start = -(-reader.at // alignment) * alignment
    tensors = tuple(_place(reader, tensor, at, data_start, alignment) for tensor, at in described)
    _check_overlaps(reader, tensors)
    return GgufFile(reader.path, len(reader.data), MappingProxyType(metadata), tensors)


def _metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for number in range(count):
        at = reader.at
        key = reader.string(f"metadata key {number}")
        if not key or len(key) > MAX_KEY_BYTES:
            raise reader.error(at, f"metadata key {number}", f"has {len(key)} characters")
        if key in metadata:
            raise reader.error(at, f"metadata key {key!r:.80}", "occurs twice")
        metadata[key] = _value(reader, reader.number("I", f"type of {key!r:.80}"), f"{key!r:.80}")
        if key == "general.alignment":
            _check_alignment(reader, at, metadata[key])
    return metadata


def _value(reader: _Reader, kind: int, field: str) -> Any:
    at = reader.at
    if kind in _SCALARS:
        return reader.number(_SCALARS[kind], field)
    if kind == _STRING:
        return reader.string(field)
    if kind != _ARRAY:
        raise reader.error(at - 4, f"type of {field}", f"is {kind}, which is no GGUF value type")
    kind = reader.number("I", f"element type of {field}")
    count = reader.number("Q", f"length of {field}")
    if kind == _STRING:
        if count * 8 > reader.left:
            raise reader.error(at + 4, field, f"has {count} strings in {reader.left} bytes: truncated")
        return _strings(reader, count, field)
    if kind not in _SCALARS:
        what = "an array in an array" if kind == _ARRAY else f"type {kind}, which is no GGUF value type"
        raise reader.error(at, f"element type of {field}", f"is {what}")
    code = _SCALARS[kind]
    values = array("B" if code == "?" else code)
    if count * values.itemsize > reader.left:
        raise reader.error(at + 4, field, f"has {count} elements in {reader.left} bytes: truncated")
    values.frombytes(reader.take(count * values.itemsize, field))
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _strings(reader: _Reader, count: int, field: str) -> list[str]:
    """Read a vocabulary: a quarter of a million strings, so without a call for each."""
    data = reader.data
    at = reader.at
    end = len(data)
    length_at = struct.Struct("<Q").unpack_from
    strings: list[str] = []
    for number in range(count):
        if end - at < 8:
            raise reader.error(at, f"{field}[{number}]", "has no room for its length: the file is truncated")
        length = length_at(data, at)[0]
        if length > end - at - 8:
            raise reader.error(
                at, f"{field}[{number}]", f"is declared with {length} bytes: the file is truncated"
            )
        try:
            strings.append(data[at + 8 : at + 8 + length].decode("utf-8"))
        except UnicodeDecodeError:
            raise reader.error(at, f"{field}[{number}]", "is not UTF-8") from None
        at += 8 + length
    reader.at = at
    return strings


def _check_alignment(reader: _Reader, at: int, alignment: Any) -> None:
    if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.error(
            at,
            "'general.alignment'",
            f"is {alignment!r:.40}; wanted a power of two from 8 to {MAX_ALIGNMENT}",
        )


@dataclass(frozen=True, slots=True)
class _Description:
    name: str
    type: GgmlType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _descriptions(reader: _Reader, count: int) -> list[tuple[_Description, int]]:
    described: list[tuple[_Description, int]] = []
    names: set[str] = set()
    for number in range(count):
        at = reader.at
        name = reader.string(f"name of tensor {number}")
        field = f"tensor {name!r:.80}"
        if name in names:
            raise reader.error(at, field, "occurs twice")
        names.add(name)
        dimensions = reader.number("I", f"dimension count of {field}")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise reader.error(at, field, f"has {dimensions} dimensions; wanted 1 to {MAX_DIMENSIONS}")
        extents = [reader.number("Q", f"dimensions of {field}") for _ in range(dimensions)]
        kind = reader.number("I", f"type of {field}")
        offset = reader.number("Q", f"offset of {field}")
        ggml_type = _ggml_type(reader, at, field, kind)
        nbytes = _size(reader, at, field, extents, ggml_type)
        described.append((_Description(name, ggml_type, tuple(reversed(extents)), offset, nbytes), at))
    return described


def _ggml_type(reader: _Reader, at: int, field: str, kind: int) -> GgmlType:
    if kind in GGML_TYPES:
        return GGML_TYPES[kind]
    if kind in OTHER_GGML_TYPES:
        raise ModelError(
            "gguf-type-unsupported",
            f"{reader.path}: {field} is stored as {OTHER_GGML_TYPES[kind]}, which this host cannot use; "
            "nothing was imported",
            facts=[("file", str(reader.path)), ("supported", [t.name for t in GGML_TYPES.values()])],
            remedy="Choose another quantisation of the same model, such as Q4_K_M or Q8_0.",
        )
    raise reader.error(at, field, f"has type {kind}, which is no GGML type")


def _size(reader: _Reader, at: int, field: str, extents: Sequence[int], kind: GgmlType) -> int:
    if 0 in extents:
        raise reader.error(at, field, f"has a dimension of 0: {list(extents)}")
    values = math.prod(extents)
    if extents[0] % kind.block:
        raise reader.error(
            at,
            field,
            f"has rows of {extents[0]} values, no multiple of the {kind.block} in a {kind.name} block",
        )
    nbytes = values // kind.block * kind.block_bytes
    if nbytes > len(reader.data):
        raise reader.error(
            at,
            field,
            f"needs {nbytes} bytes for {list(extents)} as {kind.name}; the file has {len(reader.data)}",
        )
    return nbytes


def _place(reader: _Reader, tensor: _Description, at: int, data_start: int, alignment: int) -> GgufTensor:
    field = f"tensor {tensor.name!r:.80}"
    if tensor.offset % alignment:
        raise reader.error(at, field, f"has offset {tensor.offset}, no multiple of the alignment {alignment}")
    begin = data_start + tensor.offset
    if begin + tensor.nbytes > len(reader.data):
        raise reader.error(
            at,
            field,
            f"ends at byte {begin + tensor.nbytes}; the file ends at {len(reader.data)}: truncated",
        )
    return GgufTensor(tensor.name, tensor.type, tensor.shape, begin, tensor.nbytes)


def _check_overlaps(reader: _Reader, tensors: Sequence[GgufTensor]) -> None:
    ordered = sorted(tensors, key=lambda t: t.offset)
    for before, after in pairwise(ordered):
        if before.offset + before.nbytes > after.offset:
            raise reader.error(after.offset, f"tensor {after.name!r:.80}", f"overlaps {before.name!r:.80}")
