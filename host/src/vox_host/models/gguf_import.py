"""Import a GGUF file without losing a bit of it.

Quantised blocks go into model.safetensors as they are, as 1-D U8 tensors; quant-metadata.json
says what they stand for. Everything else that a Hugging Face checkpoint has (config.json,
tokenizer.json and its companions) is made from the file's metadata.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vox_host.errors import ModelError
from vox_host.models.family_check import check_family
from vox_host.models.gguf_config import (
    CONFIG_KEYS,
    Family,
    config_json,
    family_of,
    gguf_name,
    hugging_face_names,
)
from vox_host.models.gguf_header import GgufFile, GgufTensor, read_gguf_header
from vox_host.models.gguf_tokenizer import parse_vocabulary, tokenizer_config, tokenizer_json
from vox_host.models.safetensors_write import Piece, Progress, copy_hashed, write_safetensors
from vox_host.models.source import Contents, License, as_model_error
from vox_host.models.tokenizer_file import load_tokenizer
from vox_plugin_api.checkpoint import CheckpointError
from vox_plugin_api.families.tensors import StoredAs

__all__ = ["GgufSource", "Translation", "translate"]

_FLOATS = {"f32": "F32", "f16": "F16", "bf16": "BF16"}

_TOKENIZER_ROOM_BYTES = 64 * 1024 * 1024
"""More than the JSON files of any known vocabulary take."""


@dataclass(frozen=True, slots=True)
class Translation:
    """A GGUF file as a Hugging Face checkpoint, before anything is written."""

    family: Family
    config: dict[str, Any]
    stored: Mapping[str, StoredAs]
    """The tensors, by Hugging Face's names."""
    pieces: tuple[Piece, ...]
    quant_metadata: dict[str, Any]


def translate(file: GgufFile) -> Translation:
    """Say how `file` becomes a checkpoint. Reads no weight and writes nothing.

    Raises:
        ModelError: the architecture, a tensor or a key isn't one that can be translated.
    """
    if file.metadata.get("split.count", 1) != 1:
        raise ModelError(
            "gguf-split",
            f"{file.path} is one of {file.metadata['split.count']} parts of a model; nothing was imported",
            remedy="Merge the parts into one file first (`llama-gguf-split --merge`).",
        )
    family = family_of(file)
    names = hugging_face_names(file, family)
    _check_shapes(file, names)
    pieces = [_piece(name, tensor) for name, tensor in names.items()]
    # Floats first: blocks have odd sizes, and what follows them would lie unaligned.
    pieces.sort(key=lambda piece: piece.dtype == "U8")
    quantised = {
        name: {"format": tensor.type.name, "shape": list(tensor.shape)}
        for name, tensor in names.items()
        if tensor.type.name not in _FLOATS
    }
    return Translation(
        family=family,
        config=config_json(file, family, names),
        stored={name: StoredAs(tensor.type.name, tensor.shape) for name, tensor in names.items()},
        pieces=tuple(pieces),
        quant_metadata={
            "version": 1,
            "norms_include_one": family.norms_include_one,
            "tensors": dict(sorted(quantised.items())),
        },
    )


def _piece(name: str, tensor: GgufTensor) -> Piece:
    dtype = _FLOATS.get(tensor.type.name)
    if dtype is None:
        return Piece(name, "U8", (tensor.nbytes,), tensor.offset, tensor.nbytes)
    return Piece(name, dtype, tensor.shape, tensor.offset, tensor.nbytes)


def _check_shapes(file: GgufFile, names: Mapping[str, GgufTensor]) -> None:
    for name, tensor in names.items():
        wanted = 1 if name.endswith("norm.weight") else 2
        if len(tensor.shape) != wanted or (wanted == 1 and tensor.type.name not in _FLOATS):
            raise ModelError(
                "gguf-tensor-shape",
                f"{file.path}: {tensor.name} is {tensor.type.name} {list(tensor.shape)}; "
                f"wanted {'a float vector' if wanted == 1 else 'a matrix'}; nothing was imported",
                facts=[("file", str(file.path)), ("tensor", tensor.name)],
                remedy="Take the file from another converter, or the model as a Hugging Face folder.",
            )


class GgufSource:
    """A GGUF file on disk."""

    def __init__(self, path: Path) -> None:
        """Read and check the header of `path`.

        Raises:
            ModelError: it isn't a model that can be imported.
        """
        self.path = path
        self.file = read_gguf_header(path)
        self.translation = translate(self.file)
        self.notes = _check(path, self.translation)
        self.vocabulary = parse_vocabulary(self.file.metadata, str(path))
        self.default_name = _plain_name(path.stem)
        self.license = _license(self.file)

    def needed_bytes(self) -> int:
        """Return the size of the weights, and room for the tokenizer."""
        return sum(piece.nbytes for piece in self.translation.pieces) + _TOKENIZER_ROOM_BYTES

    def identity(self, progress: Progress) -> dict[str, Any]:
        """Return the file's name and digest; reads it once."""
        digest = copy_hashed(self.path, None, step="checking", progress=progress)
        return {"kind": "gguf", "file": self.path.name, "sha256": digest}

    def write(self, target: Path, scratch: Path, progress: Progress) -> Contents:
        """Write weights, config and tokenizer into `target`."""
        documents = self._documents()
        progress("tokenizer", 0, 1)
        documents["tokenizer.json"] = tokenizer_json(self.vocabulary)
        digests = {name: _write_document(target / name, value) for name, value in documents.items()}
        # A list of merges that contradicts the vocabulary shows here, not at the first request.
        load_tokenizer(target / "tokenizer.json")
        progress("tokenizer", 1, 1)
        digests["model.safetensors"] = write_safetensors(
            target / "model.safetensors",
            self.path,
            self.translation.pieces,
            step="weights",
            progress=progress,
        )
        return Contents(self.translation.family.model_type, digests)

    def _documents(self) -> dict[str, Any]:
        special = self.vocabulary.special
        ends: int | list[int] | None = special.eos
        if len(special.ends) > 1:
            ends = list(special.ends)
        documents: dict[str, Any] = {
            "config.json": self.translation.config | {"eos_token_id": ends},
            "generation_config.json": {
                "bos_token_id": special.bos,
                "eos_token_id": ends,
                "pad_token_id": special.padding,
            },
            "quant-metadata.json": self.translation.quant_metadata,
            "tokenizer_config.json": tokenizer_config(self.vocabulary),
        }
        if self.vocabulary.chat_template is not None:
            documents["chat_template.jinja"] = self.vocabulary.chat_template
        return documents


def _check(path: Path, translation: Translation) -> tuple[str, ...]:
    """Hold the file against what its family needs; return what the user should know.

    Raises:
        ModelError: it could never be loaded.
    """
    family = translation.family
    try:
        return check_family(
            translation.config,
            translation.stored,
            config_source=str(path),
            weights_source=str(path),
            spell=lambda name: gguf_name(name, family),
        )
    except CheckpointError as error:
        raised = as_model_error(error)
        made_from = [
            (key, f"made from {gguf_key.format(family.architecture)}")
            for key, gguf_key in CONFIG_KEYS.items()
            if re.search(rf"\b{key}\b", error.message)
        ]
        keys = made_from if error.code.startswith("config-") else []
        raise ModelError(
            raised.code,
            raised.message,
            facts=[("file", str(path)), *raised.facts, *keys],
            remedy="Fetch the file again; if it stays so, it was converted wrongly.",
        ) from None


def _write_document(path: Path, value: Any) -> str:
    """Write a text as it is and anything else as JSON; return the SHA-256."""
    indent = None if path.name == "tokenizer.json" else 1
    separators = (",", ":") if indent is None else None
    text = value if isinstance(value, str) else _json(value, indent, separators)
    data = text.encode()
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return hashlib.sha256(data).hexdigest()


def _json(value: Any, indent: int | None, separators: tuple[str, str] | None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, separators=separators) + "\n"


def _license(file: GgufFile) -> License:
    name = file.metadata.get("general.license")
    link = file.metadata.get("general.license.link")
    if not isinstance(name, str) or not name.strip():
        return License("unknown", "the file states no licence; look where you got it")
    where = (
        link
        if isinstance(link, str) and link
        else f"named by {file.path.name}; read its terms where you got it"
    )
    return License(name.strip(), where)


def _plain_name(text: str) -> str:
    """Make a model name of a file name: what a name can't hold becomes a hyphen."""
    return re.sub(r"[^a-z0-9._-]+", "-", text.lower()).strip("-._") or "model"
