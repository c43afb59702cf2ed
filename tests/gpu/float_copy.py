"""A model of the store whose weights are floats: those of a quantised one, rounded to bfloat16."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpu.drawn_store import add_files
from mens_core.ops import StoredTensor
from mens_cpu_ref.lane import CpuOps
from mens_cpu_ref.library import load_library
from vox_host.models.model_manifest import MODEL_MANIFEST
from vox_plugin_api.checkpoint import Checkpoint

__all__ = ["add_float_copy"]

_ROWS = 4096


def add_float_copy(source: Path, folder: Path) -> None:
    """Write a copy of the model `source` into `folder`, bfloat16 in place of what is quantised."""
    checkpoint = Checkpoint.open(source)
    quantised = checkpoint.quant_metadata.tensors
    folder.mkdir(parents=True)
    for path in source.iterdir():
        kept = path.suffix != ".safetensors" and path.name not in (MODEL_MANIFEST, "quant-metadata.json")
        if path.is_file() and kept and not path.name.endswith("index.json"):
            (folder / path.name).write_bytes(path.read_bytes())
    ops = CpuOps(load_library().kernels)
    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for name, entry in checkpoint.items():
        if name in quantised:
            tensor = quantised[name]
            data = _as_bf16(_rows(ops, name, tensor.format, tensor.shape, checkpoint)).tobytes()
            dtype, shape = "BF16", list(tensor.shape)
        else:
            data, dtype, shape = bytes(checkpoint.data(name)), entry.dtype, list(entry.shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(data)]}
        at += len(data)
        parts.append(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("xb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)
    if checkpoint.quant_metadata.norms_include_one:
        metadata = {"version": 1, "tensors": {}, "norms_include_one": True}
        (folder / "quant-metadata.json").write_text(json.dumps(metadata), "utf-8")
    architecture = json.loads((source / MODEL_MANIFEST).read_text("utf-8"))["architecture"]
    add_files(folder, architecture=architecture, digests={})


def _rows(ops: CpuOps, name: str, weight_format: Any, shape: tuple[int, int], checkpoint: Checkpoint) -> Any:
    """The matrix as float32: each of its rows looked up, as an embedding's is."""
    matrix = ops.load_matrix(StoredTensor(name, weight_format, shape, checkpoint.data(name)))
    rows = []
    for first in range(0, shape[0], _ROWS):
        ids = np.arange(first, min(first + _ROWS, shape[0]), dtype=np.int32)
        rows.append(np.array(ops.to_host(ops.embed(matrix, ids, None, name=name))))
    return np.concatenate(rows)


def _as_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded to nearest even."""
    bits = x.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)).astype(np.uint16)
