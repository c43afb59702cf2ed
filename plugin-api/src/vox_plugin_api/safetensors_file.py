"""Read the header of a safetensors file, trusting nothing in it.

A file is: 8 bytes, the header's length (little-endian); the header, a JSON object
`{name: {"dtype", "shape", "data_offsets"}}`; the tensors' bytes. Every claim of the header is
held against the size the file really has before a byte of a tensor is looked at.
"""

from __future__ import annotations

import math
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from vox_plugin_api.strict_json import MAX_JSON_BYTES, CheckpointError, parse_json_object

__all__ = ["DTYPE_BYTES", "SafetensorsFile", "TensorEntry", "read_safetensors_header"]

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

MAX_RANK = 32

_CODE = "safetensors-invalid"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    """Of its first byte, from the beginning of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class SafetensorsFile:
    """A file whose header was checked."""

    path: Path
    size_bytes: int
    modified_ns: int
    entries: dict[str, TensorEntry]
    metadata: dict[str, str]


def read_safetensors_header(path: Path) -> SafetensorsFile:
    """Read and check the header of `path`.

    Raises:
        CheckpointError: the file is something else, is cut, or its header doesn't fit it.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(_CODE, f"{path} is not a regular file")
        size = status.st_size
        with path.open("rb") as file:
            start = file.read(512)
            length = _header_length(path, start, size)
            file.seek(8)
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(
            "checkpoint-unreadable", f"{path} cannot be read: {error.strerror}", facts={"file": str(path)}
        ) from None
    source = f"the header of {path}"
    fields = parse_json_object(header, source=source, code=_CODE)
    metadata = _metadata(path, fields.pop("__metadata__", None))
    data_start = 8 + length
    entries = {name: _entry(path, name, value, data_start, size) for name, value in fields.items()}
    _check_coverage(path, entries, data_start, size)
    return SafetensorsFile(path, size, status.st_mtime_ns, entries, metadata)


def _header_length(path: Path, start: bytes, size: int) -> int:
    """Return the declared length once it is known to fit the file."""
    # Only a file that can't be safetensors is asked what else it is: a true one has a brace here.
    if start[8:9] != b"{":
        _name_other_format(path, start, size)
    if size < 8:
        raise CheckpointError(
            _CODE,
            f"{path} has {size} bytes; a safetensors file begins with an 8-byte header length",
            facts={"file": str(path), "size_bytes": size},
            remedy="Fetch the file again: this one is empty or was cut.",
        )
    length = int.from_bytes(start[:8], "little")
    if length > size - 8:
        raise CheckpointError(
            _CODE,
            f"{path} declares a header of {length} bytes, but only {size - 8} of its {size} bytes follow",
            facts={"file": str(path), "declared_bytes": length, "size_bytes": size},
            remedy="Fetch the file again: this one is damaged, was cut, or isn't safetensors.",
        )
    if length > MAX_JSON_BYTES:
        raise CheckpointError(
            _CODE,
            f"{path} declares a header of {length} bytes; the format allows {MAX_JSON_BYTES}",
            facts={"file": str(path), "declared_bytes": length, "size_bytes": size},
        )
    return length


def _name_other_format(path: Path, start: bytes, size: int) -> None:
    text = start.lstrip()[:64].lower()
    if start.startswith(b"version https://git-lfs"):
        found = "a Git LFS pointer: the weights were not downloaded"
        remedy = "Run `git lfs pull` in the folder it came from, then import again."
    elif text.startswith((b"<!doctype html", b"<html")):
        found = "an HTML page, probably an error page saved in place of the file"
        remedy = "Fetch the file again and look at the address and the access rights."
    elif start.startswith(b"PK\x03\x04"):
        found = "a zip archive, as PyTorch's own .bin and .pt files are"
        remedy = "Convert it to safetensors first; pickled weights can run code and are not read."
    elif start.startswith(b"GGUF"):
        found = "a GGUF file"
        remedy = "Import it by its own name: `vox-host model import FILE.gguf`."
    elif start.startswith(b"\x80\x02"):
        found = "a Python pickle"
        remedy = "Convert it to safetensors first; pickled weights can run code and are not read."
    else:
        return
    declared = int.from_bytes(start[:8], "little")
    raise CheckpointError(
        _CODE,
        f"{path} is not a safetensors file: it is {found}",
        facts={"file": str(path), "declared_bytes": declared, "size_bytes": size},
        remedy=remedy,
    )


def _metadata(path: Path, value: Any) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise CheckpointError(_CODE, f"{path}: __metadata__ must map names to strings")
    return value


def _entry(path: Path, name: str, value: Any, data_start: int, size: int) -> TensorEntry:
    if not isinstance(value, dict):
        raise _bad_tensor(path, name, f"is described by {value!r:.60}, not by an object")
    dtype, shape, offsets = value.get("dtype"), value.get("shape"), value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            "safetensors-dtype",
            f"{path}: tensor {name!r} has the unknown dtype {dtype!r:.60}",
            facts={"file": str(path), "tensor": name, "found": dtype, "known": sorted(DTYPE_BYTES)},
        )
    if not _is_list_of_counts(shape) or len(shape) > MAX_RANK:
        raise _bad_tensor(path, name, f"has the shape {shape!r:.60}; wanted whole numbers from 0 up")
    if not _is_list_of_counts(offsets) or len(offsets) != 2:
        raise _bad_tensor(path, name, f"has the data_offsets {offsets!r:.60}; wanted [begin, end]")
    begin, end = offsets
    if begin > end:
        raise _bad_tensor(path, name, f"ends at {end}, before it begins at {begin}")
    if end > size - data_start:
        raise _bad_tensor(
            path, name, f"ends at byte {end} of the data, but the file has {size - data_start} bytes of data"
        )
    needed = math.prod(shape) * DTYPE_BYTES[dtype]
    if needed != end - begin:
        raise _bad_tensor(
            path, name, f"is declared as {dtype} {shape}, {needed} bytes, but has {end - begin} in the file"
        )
    return TensorEntry(name, dtype, tuple(shape), path, data_start + begin, needed)


def _is_list_of_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _bad_tensor(path: Path, name: str, problem: str) -> CheckpointError:
    return CheckpointError(
        "safetensors-tensor",
        f"{path}: tensor {name!r} {problem}",
        facts={"file": str(path), "tensor": name},
        remedy="Fetch the file again: this one is damaged.",
    )


def _check_coverage(path: Path, entries: dict[str, TensorEntry], data_start: int, size: int) -> None:
    """The tensors must cover the data exactly: an overlap or a hole means a wrong offset."""
    expected = data_start
    previous = "the header"
    for entry in sorted(entries.values(), key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != expected:
            what = "overlaps" if entry.offset < expected else "leaves a hole after"
            raise _bad_tensor(
                path,
                entry.name,
                f"begins at byte {entry.offset - data_start} of the data and {what} {previous}, "
                f"which ends at byte {expected - data_start}",
            )
        expected += entry.nbytes
        previous = repr(entry.name)
    if expected != size:
        raise CheckpointError(
            _CODE,
            f"{path} has {size - expected} bytes after {previous} that belong to no tensor",
            facts={"file": str(path), "expected_size_bytes": expected, "size_bytes": size},
        )
