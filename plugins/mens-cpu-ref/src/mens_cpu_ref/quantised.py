"""Quantised weights of the CPU lane: packing, activations, `linear`, `embed`.

The arithmetic is native (native/quant_abi.h, defined in docs/numerics.md); this module
owns the memory and the shapes. Every function takes the table of native functions to use, the
kernels' or the scalar reference's: buffers made by one are not for the other.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.ops import NOT_FINITE_REMEDY, Format, StoredTensor
from mens_cpu_ref.arrays import WeightMemory, address_of
from vox_plugin_api.backend import BackendError

__all__ = [
    "KERNELS_ONLY",
    "MANY_ROWS",
    "OPERATORS",
    "UPPER",
    "Activations",
    "QuantisedMatrix",
    "block_of",
    "check_memory",
    "greatest",
    "linear",
    "pack_matrix",
    "quantise",
    "take_rows",
]

_P = ctypes.c_void_p
_I = ctypes.c_int64
_N = ctypes.c_int32

OPERATORS: Mapping[str, tuple[Any, ...]] = {
    "quant_packed_bytes": (_N, _I, _I),
    "quant_file_bytes": (_N, _I, _I),
    "quant_activation_bytes": (_N, _I, _I),
    "quant_pack": (_N, _P, _I, _I, _P),
    "quant_activations": (_N, _P, _I, _I, _P),
    "quant_linear": (_N, _P, _I, _I, _P, _I, _P),
    "quant_rows": (_N, _P, _I, _I, _P, _I, ctypes.c_float, _P),
}
"""Arguments of each native operator after its prefix; all return int64."""

KERNELS_ONLY: Mapping[str, tuple[Any, ...]] = {
    "quant_choose_bytes": (_I, _I, _I),
    "quant_choose": (_P, _I, _I, _P, _I, _P, _P, _P),
    "quant_greatest": (_N, _P, _I, _I, _P, _I, _P),
}
"""What finds an operator's result another way."""

Functions = Mapping[str, Callable[..., int]]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_NUMBERS: Mapping[str, int] = {"q8_0": 0, "q5_0": 1, "q4_0": 2, "q4_k": 3, "q5_k": 4, "q6_k": 5}
_OUT_OF_MEMORY = -1
UPPER, _LOWER = 6, 7
"""Packings of Q8_0: a matrix is packed once in each (VOX_Q8_0_UPPER of native/quant_abi.h)."""
MANY_ROWS = 1 << 14
"""From here on a Q8_0 matrix lies in halves: one so tall is what tokens are chosen from."""
_GROUP_ROWS = 16
"""Rows packed together (kGroupRows of quant_formats.h); a piece is whole groups."""
_PIECE_BYTES = 8 << 20
_GREATEST_ROWS = 16
"""Rows of x whose greatest outputs are found without keeping any (VOX_GREATEST_ROWS)."""


def block_of(weight_format: Format) -> int:
    """Columns per block, of the weights and of the activations they want."""
    return 32 if weight_format in ("q8_0", "q5_0", "q4_0") else 256


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """A weight [rows, columns] in the packed form of the functions that made it."""

    format: Format
    number: int
    block: int
    """Columns per block; matrices with the same block share activations."""
    rows: int
    columns: int
    packed: Bytes
    address: int

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return self.packed.nbytes


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Rows of x as int8 codes with their scales, for every weight with this block."""

    block: int
    rows: int
    columns: int
    buffer: Bytes
    address: int


def pack_matrix(
    functions: Functions, stored: StoredTensor, memory: WeightMemory | None = None
) -> QuantisedMatrix:
    """Pack a matrix of raw GGML blocks into `memory` (None: its own); the mapping behind `stored` may go.

    Raises:
        BackendError: the bytes do not make the shape, or a scale is not finite.
    """
    number = _NUMBERS[stored.format]
    rows, columns = stored.shape if len(stored.shape) == 2 else (0, 0)
    expected = functions["quant_file_bytes"](number, rows, columns)
    if expected != stored.data.nbytes:
        raise BackendError(
            "tensor-size",
            f"tensor {stored.name!r} does not hold the blocks its shape needs; no model was loaded",
            facts={
                "tensor": stored.name,
                "format": stored.format,
                "shape": list(stored.shape),
                "columns_per_block": block_of(stored.format),
                "expected_bytes": expected if expected >= 0 else None,
                "found_bytes": stored.data.nbytes,
            },
            remedy="import the model again from its source",
        )
    packings = _packings(functions, number, rows)
    file = np.frombuffer(stored.data, np.uint8)
    sizes = [functions["quant_packed_bytes"](packing, rows, columns) for packing in packings]
    packed = (memory or WeightMemory()).take(sum(sizes))
    address = address_of(packed)
    # Piece by piece, each given back before the next: file and copy are never both in memory.
    step = max(_GROUP_ROWS, _PIECE_BYTES * rows // max(1, expected) // _GROUP_ROWS * _GROUP_ROWS)
    source, source_row = address_of(file), expected // rows
    for first in range(0, rows, step):
        count = min(step, rows - first)
        target = address
        for packing, size in zip(packings, sizes, strict=True):
            place = target + (functions["quant_packed_bytes"](packing, first, columns) if first else 0)
            code = functions["quant_pack"](packing, source + first * source_row, count, columns, place)
            check_memory(code, f"loading {stored.name}")
            if code > 0:
                raise BackendError(
                    "weights-not-finite",
                    f"tensor {stored.name!r} has a block whose scale is infinite or NaN; no model was loaded",
                    facts={"tensor": stored.name, "row": first + code - 1},
                    remedy=NOT_FINITE_REMEDY,
                )
            target += size
        stored.taken((first + count) * source_row)
    block = block_of(stored.format)
    return QuantisedMatrix(stored.format, packings[0], block, rows, columns, packed, address)


def _packings(functions: Functions, number: int, rows: int) -> tuple[int, ...]:
    """How a matrix of this format is packed: once, or in two halves behind one another."""
    is_chosen_from = number == _NUMBERS["q8_0"] and rows >= MANY_ROWS and "quant_choose" in functions
    return (UPPER, _LOWER) if is_chosen_from else (number,)


def quantise(functions: Functions, x: Floats, block: int) -> Activations:
    """Quantise rows x [N, columns] for weights with this block."""
    rows, columns = x.shape
    size = functions["quant_activation_bytes"](block, rows, columns)
    if size < 0:
        raise ValueError(f"x [{rows}, {columns}] cannot be quantised in blocks of {block}")
    buffer = np.empty(size, np.uint8)
    address = address_of(buffer)
    code = functions["quant_activations"](block, address_of(x), rows, columns, address)
    check_memory(code, "quantising activations")
    return Activations(block, rows, columns, buffer, address)


def linear(functions: Functions, x: Activations, weight: QuantisedMatrix) -> tuple[Floats, int]:
    """Return x W^T [N, rows], and the native code: 0, or 1 + the first row that is not finite."""
    if x.columns != weight.columns or x.block != weight.block:
        raise ValueError(
            f"activations [{x.rows}, {x.columns}] in blocks of {x.block} do not fit a weight "
            f"[{weight.rows}, {weight.columns}] in blocks of {weight.block}"
        )
    y = np.empty((x.rows, weight.rows), np.float32)
    code = functions["quant_linear"](
        weight.number, weight.address, weight.rows, weight.columns, x.address, x.rows, address_of(y)
    )
    return y, code


def greatest(functions: Functions, x: Floats, weight: QuantisedMatrix) -> npt.NDArray[np.int32] | None:
    """Return the ids of the greatest outputs of rows x [N, columns], the lowest of equals, from all outputs.

    None: they have to be kept, as there are many rows, no such function, or an output that is not finite.
    """
    if not 0 < len(x) <= _GREATEST_ROWS or "quant_greatest" not in functions:
        return None
    activations = quantise(functions, x, weight.block)
    ids = np.empty(len(x), np.int32)
    code = functions["quant_greatest"](
        weight.number,
        weight.address,
        weight.rows,
        weight.columns,
        activations.address,
        activations.rows,
        address_of(ids),
    )
    check_memory(code, "looking for the greatest output")
    return ids if code == 0 else None


def take_rows(
    functions: Functions, weight: QuantisedMatrix, ids: npt.NDArray[np.int32], scale: float | None
) -> tuple[Floats, int]:
    """Return rows `ids` in float32, times `scale`, and the native code (-2: an id is out of range)."""
    wanted = np.ascontiguousarray(ids, np.int32)
    out = np.empty((wanted.size, weight.columns), np.float32)
    code = functions["quant_rows"](
        weight.number,
        weight.address,
        weight.rows,
        weight.columns,
        address_of(wanted),
        wanted.size,
        1.0 if scale is None else scale,
        address_of(out),
    )
    return out, code


def check_memory(code: int, what: str) -> None:
    """Raise `out-of-memory` where a native code says so."""
    if code == _OUT_OF_MEMORY:
        raise BackendError(
            "out-of-memory",
            f"{what}: the CPU lane could not get its working memory; it was not done",
            remedy="close other programs, or lower the number of sequences and the context length",
        )
