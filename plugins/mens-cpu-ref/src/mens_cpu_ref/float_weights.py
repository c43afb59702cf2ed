"""Float weights from a checkpoint into the memory and the layout of the native functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.ops import NOT_FINITE_REMEDY, StoredTensor, is_quantised
from mens_core.stored_size import wrong_size
from mens_cpu_ref.arrays import Rows, WeightMemory, address_of, untouched_zeros
from mens_cpu_ref.library import Function
from mens_cpu_ref.matrices import FloatMatrix
from vox_plugin_api.backend import BackendError

__all__ = [
    "FLOAT_FORMATS",
    "load_float_matrix",
    "load_float_vector",
    "pack_compact",
    "pack_floats",
    "raise_for",
]

_OUT_OF_MEMORY = -1
_PANEL = 16
FLOAT_FORMATS: Mapping[str, int] = {"f32": 0, "f16": 1, "bf16": 2}
_COMPACT = 3
"""Format of a bf16 matrix in twelve bits a weight (VOX_BF16_COMPACT of native/abi.h)."""
_MOST_KEPT = 1 / 64
"""Share of a matrix's columns of 16 weights that may be kept: each makes a product wait for a moment."""
_WORTHWHILE = 0.9
"""Share of its own bytes that a compact matrix may have."""
_ELEMENT_TYPES: Sequence[type[np.generic]] = (np.uint32, np.uint16, np.uint16)


def load_float_matrix(
    functions: Mapping[str, Function], stored: StoredTensor, memory: WeightMemory
) -> FloatMatrix:
    """Pack a matrix of floats.

    Raises:
        BackendError: `tensor-size`, `weights-not-finite`, `out-of-memory`; nothing was loaded.
    """
    rows, columns = stored.shape if len(stored.shape) == 2 else (0, 0)
    source = _float_bytes(stored, rows * columns)
    if stored.format == "bf16" and "compact_pack" in functions:
        matrix, code = pack_compact(functions, source, (rows, columns), memory)
        _check_weights(code, stored, row=code - 1)
        if matrix is not None:
            return matrix
    matrix, code = pack_floats(functions, FLOAT_FORMATS[stored.format], source, (rows, columns), memory)
    _check_weights(code, stored, row=code - 1)
    return matrix


def load_float_vector(functions: Mapping[str, Function], stored: StoredTensor, *, plus_one: bool) -> Rows:
    """Widen a vector of floats, 1 added where asked: [n].

    Raises:
        BackendError: `vector-format`, `tensor-size`, `weights-not-finite`; nothing was loaded.
    """
    if is_quantised(stored.format) or len(stored.shape) != 1:
        raise BackendError(
            "vector-format",
            f"tensor {stored.name!r} must be a float vector; no model was loaded",
            facts={"tensor": stored.name, "format": stored.format, "shape": list(stored.shape)},
            remedy="import the model again from its source",
        )
    length = stored.shape[0]
    source = _float_bytes(stored, length)
    vector = Rows(np.empty(length, np.float32))
    number = FLOAT_FORMATS[stored.format]
    code = functions["widen"](number, address_of(source), length, int(plus_one), vector.address)
    _check_weights(code, stored)
    return vector


def pack_floats(
    functions: Mapping[str, Function],
    number: int,
    source: npt.NDArray[Any],
    shape: tuple[int, ...],
    memory: WeightMemory | None = None,
) -> tuple[FloatMatrix, int]:
    """Pack elements of a format [rows, columns]; the code is 1 + the first row that is not finite.

    Args:
        memory: where the weights of a model lie together; None for one that comes and goes.
    """
    rows, columns = shape
    padded_rows = -(-rows // _PANEL) * _PANEL
    kind = np.dtype(_ELEMENT_TYPES[number])
    size = padded_rows * columns * kind.itemsize
    packed = (untouched_zeros(size, np.uint8) if memory is None else memory.take(size)).view(kind)
    address = address_of(packed)
    code = functions["pack"](number, address_of(source), rows, columns, address)
    return FloatMatrix(number, rows, columns, packed, address), code


def pack_compact(
    functions: Mapping[str, Function],
    source: npt.NDArray[Any],
    shape: tuple[int, ...],
    memory: WeightMemory | None = None,
) -> tuple[FloatMatrix | None, int]:
    """Pack bf16 elements [rows, columns] in twelve bits each (compact_layout.h): the same values.

    Returns the matrix and the code of `pack_floats`. No matrix where the weights' exponents are spread so
    far that it would not pay; `pack_floats` then has it in its own bits.
    """
    rows, columns = shape
    panels = -(-rows // _PANEL)
    tables, kept = np.empty((panels, _PANEL), np.uint8), np.empty(panels, np.int64)
    place = address_of(source)
    code = functions["compact_measure"](place, rows, columns, address_of(tables), address_of(kept))
    total = int(kept.sum())
    size, plain = functions["compact_bytes"](rows, columns, total), 2 * _PANEL * panels * columns
    if code != 0 or total > _MOST_KEPT * panels * columns or size > _WORTHWHILE * plain:
        return None, code
    packed = (memory or WeightMemory()).take(size)
    address = address_of(packed)
    firsts = np.cumsum(kept) - kept
    code = functions["compact_pack"](place, rows, columns, address_of(tables), address_of(firsts), address)
    return FloatMatrix(_COMPACT, rows, columns, packed, address), code


def raise_for(code: int, name: str) -> None:
    """Raise what a negative code of a native function means."""
    if code == _OUT_OF_MEMORY:
        raise BackendError(
            "out-of-memory",
            f"{name}: the CPU lane could not get its working memory; the step was not finished",
            remedy="close other programs, or lower the number of sequences and the context length",
        )
    raise IndexError(f"{name}: a token id, position or block number is out of range")


def _float_bytes(stored: StoredTensor, elements: int) -> npt.NDArray[np.uint8]:
    expected = elements * (4 if stored.format == "f32" else 2)
    if stored.data.nbytes != expected or elements == 0:
        raise wrong_size(stored, expected)
    return np.frombuffer(stored.data, np.uint8)


def _check_weights(code: int, stored: StoredTensor, *, row: int | None = None) -> None:
    if code < 0:
        raise_for(code, f"loading {stored.name}")
    if code > 0:
        raise BackendError(
            "weights-not-finite",
            f"tensor {stored.name!r} holds an infinity or NaN; no model was loaded",
            facts={"tensor": stored.name} | ({} if row is None else {"row": row}),
            remedy=NOT_FINITE_REMEDY,
        )
