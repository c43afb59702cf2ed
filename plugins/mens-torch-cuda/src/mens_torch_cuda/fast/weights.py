"""Weights of a checkpoint as bfloat16 of a torch device, made once as they are loaded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from mens_core.ops import NOT_FINITE_REMEDY, StoredTensor, is_quantised
from mens_core.stored_size import wrong_size
from mens_torch_cuda.fast.blocks import BLOCKS
from vox_plugin_api.backend import BackendError
from vox_plugin_api.checkpoint import read_json_object
from vox_plugin_api.families import expected_shapes, parse_config

__all__ = ["FastMatrix", "join", "load_matrix", "load_vector", "weight_bytes"]

_FLOATS = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_PIECE = 1 << 24
"""Weights that are widened at once: the float32 between is never a whole large matrix."""


@dataclass(slots=True, eq=False)
class FastMatrix:
    """A weight [rows, columns]; matrices of one input are views of one that holds them all (`join`)."""

    data: torch.Tensor
    """bfloat16 [rows, columns]."""

    @property
    def rows(self) -> int:
        return int(self.data.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.data.nbytes)


def join(matrices: Sequence[FastMatrix]) -> torch.Tensor:
    """Lay matrices of one input below one another; each becomes a view, so nothing is held twice.

    Those that lie so already stay where they are.
    """
    first, columns = matrices[0].data, matrices[0].data.shape[1]
    ends = [matrix.data.data_ptr() + matrix.nbytes for matrix in matrices]
    begins = [matrix.data.data_ptr() for matrix in matrices]
    is_one = first.untyped_storage().data_ptr() == matrices[-1].data.untyped_storage().data_ptr()
    if is_one and begins[1:] == ends[:-1] and all(matrix.data.is_contiguous() for matrix in matrices):
        return first.as_strided((sum(matrix.rows for matrix in matrices), columns), (columns, 1))
    whole = torch.cat([matrix.data for matrix in matrices])
    at = 0
    for matrix in matrices:
        rows = matrix.rows
        matrix.data = whole[at : at + rows]
        at += rows
    return whole


def weight_bytes(model_dir: Path) -> int:
    """Return what a model folder's weights take as bfloat16, whatever their format in the file.

    Raises:
        CheckpointError: the folder is not a model's.
    """
    path = model_dir / "config.json"
    config = parse_config(read_json_object(path), source=str(path))
    numbers = sum(math.prod(shape) for shape in expected_shapes(config).values())
    return 2 * (numbers + (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size))


def load_matrix(device: torch.device, stored: StoredTensor) -> FastMatrix:
    """Take a matrix of any format, rounded once to bfloat16.

    Raises:
        BackendError: `tensor-size`, `weights-not-finite`; nothing was loaded.
    """
    if len(stored.shape) != 2:
        raise wrong_size(stored, 0)
    rows, columns = stored.shape
    if not is_quantised(stored.format):
        return FastMatrix(_floats(device, stored, torch.bfloat16).view(rows, columns))
    kind = BLOCKS[stored.format]
    expected = rows * columns // kind.weights * kind.nbytes
    if columns % kind.weights or expected != stored.data.nbytes:
        raise wrong_size(stored, expected)
    blocks = _bytes(stored).view(-1, kind.nbytes)
    out = torch.empty(rows * columns, dtype=torch.bfloat16, device=device)
    together = _PIECE // kind.weights
    for first in range(0, len(blocks), together):
        piece = kind.widen(blocks[first : first + together].to(device)).flatten()
        at = first * kind.weights
        out[at : at + len(piece)] = piece
    _check_finite(out, stored)
    return FastMatrix(out.view(rows, columns))


def load_vector(device: torch.device, stored: StoredTensor, *, plus_one: bool) -> torch.Tensor:
    """Take a float vector as float32, 1 added where asked.

    Raises:
        BackendError: `vector-format`, `tensor-size`, `weights-not-finite`; nothing was loaded.
    """
    if is_quantised(stored.format):
        raise BackendError(
            "vector-format",
            f"tensor {stored.name!r} must be a float vector; no model was loaded",
            facts={"tensor": stored.name, "format": stored.format, "shape": list(stored.shape)},
            remedy="import the model again from its source",
        )
    values = _floats(device, stored, torch.float32)
    return values + 1 if plus_one else values


def _floats(device: torch.device, stored: StoredTensor, dtype: torch.dtype) -> torch.Tensor:
    kind = _FLOATS[stored.format]
    count = math.prod(stored.shape)
    if count == 0 or stored.data.nbytes != count * kind.itemsize:
        raise wrong_size(stored, count * kind.itemsize)
    # Copied: the file's mapping goes when loading ends.
    values = _bytes(stored).view(kind).to(device, copy=True)
    _check_finite(values, stored)
    values = values.to(dtype)
    _check_finite(values, stored)  # a float32 may be beyond bfloat16's largest
    return values


def _bytes(stored: StoredTensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mapping can't be written to, and isn't
        return torch.frombuffer(stored.data, dtype=torch.uint8)


def _check_finite(values: torch.Tensor, stored: StoredTensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise BackendError(
            "weights-not-finite",
            f"tensor {stored.name!r} holds an infinity, NaN or a number beyond bfloat16; no model was loaded",
            facts={"tensor": stored.name},
            remedy=NOT_FINITE_REMEDY,
        )
