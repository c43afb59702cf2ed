"""Puts a model of drawn weights into a host's store, with a tokenizer of one token per byte.

The weights are those of `shape_model.write_shape`, in shards that several processes draw, write and hash at
once: a model of 16 GB takes some seconds in memory. A store knows it as it knows an imported one.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from gpu.shape_model import STORED_AS, TensorBytes, drawn_tensors
from vox_host.models.model_manifest import (
    MODEL_MANIFEST,
    FileRecord,
    LicenseRecord,
    ModelManifest,
    manifest_text,
    model_digest,
)
from vox_host.models.verifying import note_as_verified
from vox_plugin_api.families import expected_shapes, parse_config

__all__ = ["add_drawn_model", "add_files"]

_INDEX = "model.safetensors.index.json"
_SHARDS = 8
_END = "<|end|>"


def add_drawn_model(
    models: Path, name: str, shape: Mapping[str, Any], weight_format: str, *, layers: int
) -> Path:
    """Write `name` into the store's folder `models`; return its folder."""
    folder = models / name
    folder.mkdir(parents=True)
    settings = {**shape, "num_hidden_layers": layers, "eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    (folder / "tokenizer.json").write_text(_byte_tokenizer(), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": _END}), "utf-8")
    names = _largest_first(settings)
    shards = [names[first::_SHARDS] for first in range(_SHARDS)]
    files = [f"model-{i + 1:05}-of-{_SHARDS:05}.safetensors" for i in range(_SHARDS)]
    with ProcessPoolExecutor(min(_SHARDS, os.cpu_count() or 1)) as pool:
        writing = [
            pool.submit(_write_shard, folder / file, settings, weight_format, shard)
            for file, shard in zip(files, shards, strict=True)
        ]
        digests = {file: done.result() for file, done in zip(files, writing, strict=True)}
    index = {"weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard}}
    (folder / _INDEX).write_text(json.dumps(index), "utf-8")
    if weight_format == "q8_0":
        stored = {
            name: {"format": "q8_0", "shape": list(tensor_shape)}
            for name, tensor_shape in _shapes(settings).items()
            if len(tensor_shape) == 2
        }
        (folder / "quant-metadata.json").write_text(json.dumps({"version": 1, "tensors": stored}), "utf-8")
    add_files(folder, architecture="qwen3", digests=digests)
    return folder


def add_files(folder: Path, *, architecture: str, digests: Mapping[str, str]) -> None:
    """Write the manifest of what lies in `folder`, and note it as checked.

    Args:
        digests: SHA-256 of files that were hashed while they were written.
    """
    hashed = {
        path.name: digests.get(path.name) or hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }
    manifest = ModelManifest(
        name=folder.name,
        digest=model_digest(hashed),
        architecture=architecture,
        license=LicenseRecord(id="none", terms="drawn at random", accepted=True),
        source={"kind": "script"},
        imported_at="2026-01-02T03:04:05+00:00",
        files={
            file: FileRecord(sha256=digest, size_bytes=(folder / file).stat().st_size)
            for file, digest in hashed.items()
        },
    )
    (folder / MODEL_MANIFEST).write_text(manifest_text(manifest), "utf-8")
    note_as_verified(folder)


def _shapes(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    config = parse_config(settings)
    shapes = {"model." + name: tuple(shape) for name, shape in expected_shapes(config).items()}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes


def _largest_first(settings: Mapping[str, Any]) -> list[str]:
    """Names in an order that gives every shard about as many bytes."""
    shapes = _shapes(settings)
    return sorted(shapes, key=lambda name: (-_count(shapes[name]), name))


def _count(shape: Sequence[int]) -> int:
    return shape[0] * (shape[1] if len(shape) == 2 else 1)


def _write_shard(path: Path, settings: Mapping[str, Any], weight_format: str, names: Sequence[str]) -> str:
    """Write some tensors as a safetensors file; return its SHA-256."""
    drawn = dict(drawn_tensors(parse_config(settings), weight_format, only=frozenset(names)))
    header: dict[str, Any] = {}
    at = 0
    for name in names:
        tensor = drawn[name]
        dims = [tensor.nbytes] if tensor.format == "q8_0" else list(tensor.shape)
        header[name] = {
            "dtype": STORED_AS[tensor.format],
            "shape": dims,
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    start = struct.pack("<Q", len(text)) + text
    digest = hashlib.sha256(start)
    with path.open("xb", buffering=0) as file:
        file.write(start)
        for name in names:
            for part in _parts(drawn[name]):
                file.write(part)
                digest.update(part)
    return digest.hexdigest()


def _parts(tensor: TensorBytes) -> list[memoryview]:
    """The piece round and round, up to the tensor's end; nothing is copied."""
    whole = memoryview(tensor.piece.view("uint8")).cast("B")
    turns, rest = divmod(tensor.nbytes, len(whole))
    return [whole] * turns + ([whole[:rest]] if rest else [])


def _byte_tokenizer() -> str:
    """A tokenizer.json of one token per byte, the same text whatever library reads it."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = [chr(b) for b in printable] + [chr(0x100 + n) for n in range(256 - len(printable))]
    by_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end = {"id": len(letters), "content": _END, "special": True}
    flags = ("single_word", "lstrip", "rstrip", "normalized")
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{**end, **dict.fromkeys(flags, False)}],
            "normalizer": None,
            "pre_tokenizer": by_bytes,
            "post_processor": None,
            "decoder": by_bytes,
            "model": {"type": "BPE", "vocab": {c: i for i, c in enumerate(sorted(letters))}, "merges": []},
        }
    )
