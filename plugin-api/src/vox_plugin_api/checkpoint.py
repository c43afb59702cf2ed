"""A model directory on disk, read strictly and by need.

    config.json                        the model's constants (read it with `read_json_object`)
    model.safetensors                  the weights, or:
    model.safetensors.index.json       which shard holds which tensor, and the shards
    quant-metadata.json                optional: which 1-D U8 tensors are raw GGML blocks

`Checkpoint.open` checks every file's header against the file and reads no weight; `data` maps
a file when the first of its tensors is asked for. Host and workers use the same code.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from vox_plugin_api.safetensors_file import SafetensorsFile, TensorEntry, read_safetensors_header
from vox_plugin_api.strict_json import CheckpointError, parse_json_object, read_json_object

__all__ = [
    "FORMATS",
    "GGML_BLOCKS",
    "Checkpoint",
    "CheckpointError",
    "Format",
    "QuantMetadata",
    "QuantTensor",
    "TensorEntry",
    "parse_json_object",
    "read_json_object",
    "read_safetensors_header",
]

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
QUANT_METADATA = "quant-metadata.json"

GGML_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "q4_0": (32, 18),
        "q5_0": (32, 22),
        "q8_0": (32, 34),
        "q4_k": (256, 144),
        "q5_k": (256, 176),
        "q6_k": (256, 210),
    }
)
"""Format: (weights in a block, bytes of a block)."""

Format = Literal["f32", "f16", "bf16", "q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k"]
"""How a weight is stored, as the operators of a plugin know it."""

FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "F32": "f32",
        "F16": "f16",
        "BF16": "bf16",
        "q4_0": "q4_0",
        "q5_0": "q5_0",
        "q8_0": "q8_0",
        "q4_k": "q4_k",
        "q5_k": "q5_k",
        "q6_k": "q6_k",
    }
)
"""Format by the word that a header or quant-metadata.json has for it."""


@dataclass(frozen=True, slots=True)
class QuantTensor:
    """What the raw blocks of a 1-D U8 tensor stand for."""

    format: str
    """A key of `GGML_BLOCKS`."""
    shape: tuple[int, int]
    """(rows, columns) of the matrix; each row is a whole number of blocks."""


@dataclass(frozen=True, slots=True)
class QuantMetadata:
    """The content of quant-metadata.json."""

    tensors: Mapping[str, QuantTensor]
    norms_include_one: bool
    """Whether norm weights are stored as the multiplier itself, where the family adds 1 (Gemma)."""


_NOTHING_QUANTISED = QuantMetadata(tensors=MappingProxyType({}), norms_include_one=False)


class Checkpoint(Mapping[str, TensorEntry]):
    """The tensors of a model directory, by name. Make it with `open`."""

    def __init__(
        self, path: Path, files: Mapping[Path, SafetensorsFile], entries: Mapping[str, TensorEntry]
    ) -> None:
        self.path = path
        self.quant_metadata = _NOTHING_QUANTISED
        self._files = files
        self._entries = entries
        self._maps: dict[Path, mmap.mmap] = {}

    @classmethod
    def open(cls, path: Path | str) -> Checkpoint:
        """Read the headers of the model directory `path` (or of one .safetensors file).

        Raises:
            CheckpointError: a file is missing, malformed, or contradicts another.
        """
        path = Path(path)
        if path.is_file():
            file = read_safetensors_header(path)
            return cls(path, {path: file}, file.entries)
        if (path / WEIGHTS).exists():
            file = read_safetensors_header(path / WEIGHTS)
            checkpoint = cls(path, {file.path: file}, file.entries)
        elif (path / INDEX).exists():
            files, entries = _read_shards(path)
            checkpoint = cls(path, files, entries)
        else:
            raise _no_weights(path)
        if (path / QUANT_METADATA).exists():
            checkpoint.quant_metadata = _read_quant_metadata(path / QUANT_METADATA, checkpoint)
        return checkpoint

    def __getitem__(self, name: str) -> TensorEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files, in the order of their names."""
        return tuple(sorted(self._files))

    def data(self, name: str) -> memoryview:
        """Return the bytes of tensor `name`: a read-only view into its file's mapping.

        Raises:
            KeyError: there is no such tensor.
            CheckpointError: the file changed since `open`.
        """
        entry = self._entries[name]
        return memoryview(self._map(entry.file))[entry.offset : entry.offset + entry.nbytes]

    def release(self, name: str, nbytes: int | None = None) -> None:
        """Tell the system that the pages of tensor `name` are not needed now.

        Args:
            nbytes: only this many leading bytes; None: all of the tensor.

        A view stays valid: what is touched again is read again. A lane that repacks a tensor
        calls this afterwards, so that file and copy don't both count as its memory.
        """
        entry = self._entries[name]
        mapping = self._maps.get(entry.file)
        if mapping is None or not hasattr(mapping, "madvise") or not entry.nbytes:
            return
        size = entry.nbytes if nbytes is None else min(nbytes, entry.nbytes)
        start = entry.offset - entry.offset % mmap.PAGESIZE
        mapping.madvise(mmap.MADV_DONTNEED, start, entry.offset + size - start)

    def close(self) -> None:
        """Let go of the mappings; memory is unmapped when the last view of it is gone."""
        self._maps.clear()

    def _map(self, path: Path) -> mmap.mmap:
        mapping = self._maps.get(path)
        if mapping is None:
            checked = self._files[path]
            with path.open("rb") as file:
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            # Reading past the end of a file that shrank would kill the process (SIGBUS).
            if len(mapping) != checked.size_bytes or path.stat().st_mtime_ns != checked.modified_ns:
                raise CheckpointError(
                    "checkpoint-changed",
                    f"{path} changed after its header was read; nothing was loaded from it",
                    facts={"expected_size_bytes": checked.size_bytes, "size_bytes": len(mapping)},
                )
            self._maps[path] = mapping
        return mapping


def _no_weights(path: Path) -> CheckpointError:
    if not path.is_dir():
        return CheckpointError("checkpoint-missing", f"{path} is not a directory or does not exist")
    names = sorted(p.name for p in path.iterdir())
    pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    shards = [n for n in names if n.endswith(".safetensors")]
    remedy = None
    if pickles:
        remedy = "Convert it to safetensors first; pickled weights can run code and are not read."
    elif shards:
        remedy = f"Fetch {INDEX} too: it says which shard holds which tensor."
    return CheckpointError(
        "checkpoint-no-weights",
        f"{path} holds neither {WEIGHTS} nor {INDEX}",
        facts={"found": (pickles or shards or names)[:20]},
        remedy=remedy,
    )


def _read_shards(path: Path) -> tuple[dict[Path, SafetensorsFile], dict[str, TensorEntry]]:
    """Read the index and the header of every shard it names, and hold them against each other."""
    weight_map = _read_weight_map(path / INDEX)
    shards = sorted(set(weight_map.values()))
    missing = [name for name in shards if not (path / name).exists()]
    if missing:
        raise CheckpointError(
            "checkpoint-incomplete",
            f"{path} lacks {len(missing)} of {len(shards)} weight files: {', '.join(missing[:5])}",
            facts={"missing": missing, "named_by": str(path / INDEX)},
            remedy="This looks like an incomplete download: fetch the missing files.",
        )
    files = {name: read_safetensors_header(path / name) for name in shards}
    lies = [name for name, shard in weight_map.items() if name not in files[shard].entries]
    if lies:
        listed = ", ".join(f"{name} in {weight_map[name]}" for name in lies[:5])
        raise CheckpointError(
            "checkpoint-index-mismatch",
            f"{path / INDEX} names {_count(lies)} not in the files it names: {listed}",
            facts={"tensors": {name: weight_map[name] for name in lies[:100]}},
            remedy="Index and weight files are of different downloads: fetch all of them again.",
        )
    entries = {name: files[shard].entries[name] for name, shard in weight_map.items()}
    # What the index forgot is in the files all the same, and the load report must account for it.
    for file in files.values():
        for name, entry in file.entries.items():
            if name not in weight_map and entries.setdefault(name, entry) is not entry:
                raise CheckpointError(
                    "checkpoint-index-mismatch",
                    f"tensor {name!r} is in {entries[name].file} and in {entry.file}; {INDEX} names neither",
                )
    return {file.path: file for file in files.values()}, entries


def _read_weight_map(index: Path) -> dict[str, str]:
    code = "checkpoint-index-invalid"
    fields = read_json_object(index, code=code)
    weight_map = fields.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        what = "is empty" if weight_map == {} else f"is {weight_map!r:.60}"
        raise CheckpointError(
            code,
            f"{index}: weight_map {what if 'weight_map' in fields else 'is missing'}; wanted an object that "
            "names each tensor's file",
            facts={"keys": sorted(fields)[:20]},
            remedy=f"Fetch {index.name} again: this one is cut, or of another tool.",
        )
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_plain_file_name(shard):
            raise CheckpointError(
                code,
                f"{index}: weight_map puts {name!r} into {shard!r:.200}, which is not the name of a file "
                "in the model's directory",
                facts={"tensor": name, "found": shard},
            )
    return weight_map


def _is_plain_file_name(text: str) -> bool:
    return text not in ("", ".", "..") and not any(c in text for c in "/\\\0:")


def _read_quant_metadata(path: Path, checkpoint: Checkpoint) -> QuantMetadata:
    code = "quant-metadata-invalid"
    fields = read_json_object(path, code=code)
    if fields.get("version") != 1:
        raise CheckpointError(
            code, f"{path} has an unknown version", facts={"expected": 1, "found": fields.get("version")}
        )
    unknown = sorted(set(fields) - {"version", "tensors", "norms_include_one"})
    include_one = fields.get("norms_include_one", False)
    tensors = fields.get("tensors")
    if unknown or not isinstance(include_one, bool) or not isinstance(tensors, dict):
        raise CheckpointError(
            code,
            f"{path} must hold version, tensors (an object) and norms_include_one (true or false), no more",
            facts={"unknown": unknown},
        )
    parsed = {name: _quant_tensor(path, name, value, checkpoint) for name, value in tensors.items()}
    return QuantMetadata(tensors=MappingProxyType(parsed), norms_include_one=include_one)


def _quant_tensor(path: Path, name: str, value: Any, checkpoint: Checkpoint) -> QuantTensor:
    code = "quant-metadata-invalid"
    if not isinstance(value, dict) or set(value) != {"format", "shape"}:
        raise CheckpointError(code, f"{path}: tensors.{name} must hold format and shape, no more")
    weight_format, shape = value["format"], value["shape"]
    if not isinstance(weight_format, str) or weight_format not in GGML_BLOCKS:
        raise CheckpointError(
            code,
            f"{path}: tensors.{name}.format is {weight_format!r:.60}",
            facts={"known": sorted(GGML_BLOCKS)},
        )
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
        raise CheckpointError(code, f"{path}: tensors.{name}.shape is {shape!r:.60}; wanted [rows, columns]")
    rows, columns = shape
    weights, block_bytes = GGML_BLOCKS[weight_format]
    if columns % weights:
        raise CheckpointError(
            code,
            f"{path}: a row of {name} has {columns} weights, which is no multiple of the {weights} in "
            f"a block of {weight_format}",
        )
    entry = checkpoint.get(name)
    needed = rows * (columns // weights) * block_bytes
    if entry is None or entry.dtype != "U8" or entry.shape != (needed,):
        found = "no such tensor" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise CheckpointError(
            code,
            f"{path}: {name} as {weight_format} {shape} needs a tensor U8 [{needed}]; found {found}",
            facts={"tensor": name, "expected": f"U8 [{needed}]", "found": found},
        )
    return QuantTensor(weight_format, (rows, columns))


def _count(tensors: list[str]) -> str:
    return "1 tensor that is" if len(tensors) == 1 else f"{len(tensors)} tensors that are"
