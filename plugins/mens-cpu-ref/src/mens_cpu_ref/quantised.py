"""Quantised weights of the CPU lane: packing, activations, `linear`, `embed`.

The arithmetic is native (native/quant_abi.h, defined in docs/numerics-quant.md); this module
owns the memory and the shapes. Every function takes the table of native functions to use, the
kernels' or the scalar reference's: buffers made by one are not for the other.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mens_core.ops import Format, StoredTensor
from vox_plugin_api.backend import BackendError

__all__ = [
    "OPERATORS",
    "Activations",
    "QuantisedMatrix",
    "block_of",
    "linear",
    "pack_matrix",
    "quantise",
    "take_rows",
]

_P = ctypes.c_void_p
_I = ctypes.c_int64
_N = ctypes.c_int32

OPERATORS: Mapping[str, tuple[type, ...]] = {
    "quant_packed_bytes": (_N, _I, _I),
    "quant_file_bytes": (_N, _I, _I),
    "quant_activation_bytes": (_N, _I, _I),
    "quant_pack": (_N, _P, _I, _I, _P),
    "quant_activations": (_N, _P, _I, _I, _P),
    "quant_linear": (_N, _P, _I, _I, _P, _I, _P),
    "quant_rows": (_N, _P, _I, _P, _I, _P, _P),
}
"""Arguments of each native operator after its prefix; all return int64."""

Functions = Mapping[str, Callable[..., int]]
Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_NUMBERS: Mapping[Format, int] = {"q8_0": 0, "q5_0": 1, "q4_0": 2, "q4_k": 3, "q5_k": 4, "q6_k": 5}
_OUT_OF_MEMORY = -1
# Below this a huge page would waste more than it saves in address translation.
_HUGE_PAGE_BYTES = 8 << 20


def block_of(weight_format: Format) -> int:
    """Columns per block, of the weights and of the activations they want."""
    return 32 if weight_format in ("q8_0", "q5_0", "q4_0") else 256


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedMatrix:
    """A weight [rows, columns] in the packed form of the functions that made it."""

    format: Format
    rows: int
    columns: int
    packed: Bytes

    @property
    def block(self) -> int:
        """Columns per block; matrices with the same block can share activations."""
        return block_of(self.format)


@dataclass(frozen=True, slots=True, eq=False)
class Activations:
    """Rows of x as int8 codes with their scales, for every weight with this block."""

    block: int
    rows: int
    columns: int
    buffer: Bytes


def pack_matrix(functions: Functions, stored: StoredTensor) -> QuantisedMatrix:
    """Pack a matrix of raw GGML blocks; the mapping behind `stored` may be dropped afterwards.

    Raises:
        BackendError: the bytes do not make the shape, or a scale is not finite.
    """
    number = _NUMBERS[stored.format]
    rows, columns = stored.shape if len(stored.shape) == 2 else (0, 0)
    expected = functions["quant_file_bytes"](number, rows, columns)
    if expected != stored.data.nbytes:
        raise BackendError(
            "quantised-shape",
            f"tensor {stored.name!r} does not hold the blocks its shape needs; no model was loaded",
            facts={
                "tensor": stored.name,
                "format": stored.format,
                "shape": list(stored.shape),
                "columns_per_block": block_of(stored.format),
                "expected_bytes": max(expected, 0),
                "found_bytes": stored.data.nbytes,
            },
            remedy="import the model again from its source",
        )
    file = np.frombuffer(stored.data, np.uint8)
    packed = _zeroed(functions["quant_packed_bytes"](number, rows, columns))
    fault = functions["quant_pack"](number, file.ctypes.data, rows, columns, packed.ctypes.data)
    _raise_if_out_of_memory(fault)
    if fault:
        raise BackendError(
            "weights-not-finite",
            f"tensor {stored.name!r} has a block whose scale is infinite or NaN; no model was loaded",
            facts={"tensor": stored.name, "row": fault - 1},
            remedy="import the model again from its source",
        )
    return QuantisedMatrix(stored.format, rows, columns, packed)


def quantise(functions: Functions, x: Floats, block: int) -> Activations:
    """Quantise rows x [N, columns] for weights with this block."""
    rows, columns = x.shape
    size = functions["quant_activation_bytes"](block, rows, columns)
    if size < 0:
        raise ValueError(f"x [{rows}, {columns}] cannot be quantised in blocks of {block}")
    buffer = np.empty(size, np.uint8)
    fault = functions["quant_activations"](block, x.ctypes.data, rows, columns, buffer.ctypes.data)
    _raise_if_out_of_memory(fault)
    return Activations(block, rows, columns, buffer)


def linear(functions: Functions, x: Activations, weight: QuantisedMatrix) -> tuple[Floats, int]:
    """Return x W^T [N, rows], and 0 or 1 + the first row of it that is not finite."""
    if (x.columns, x.block) != (weight.columns, weight.block):
        raise ValueError(
            f"activations [{x.rows}, {x.columns}] in blocks of {x.block} do not fit a weight "
            f"[{weight.rows}, {weight.columns}] in blocks of {weight.block}"
        )
    y = np.empty((x.rows, weight.rows), np.float32)
    fault = functions["quant_linear"](
        _NUMBERS[weight.format],
        weight.packed.ctypes.data,
        weight.rows,
        weight.columns,
        x.buffer.ctypes.data,
        x.rows,
        y.ctypes.data,
    )
    _raise_if_out_of_memory(fault)
    return y, fault


def take_rows(
    functions: Functions, weight: QuantisedMatrix, ids: npt.NDArray[np.int32], scale: float | None
) -> tuple[Floats, int]:
    """Return rows `ids` in float32, times `scale`, and 0 or 1 + the first one that is not finite."""
    wanted = np.ascontiguousarray(ids, np.int32)
    if wanted.size and not (wanted.min() >= 0 and wanted.max() < weight.rows):
        raise ValueError(f"row ids must lie in [0, {weight.rows})")
    out = np.empty((wanted.size, weight.columns), np.float32)
    factor = None if scale is None else np.array([scale], np.float32)
    fault = functions["quant_rows"](
        _NUMBERS[weight.format],
        weight.packed.ctypes.data,
        weight.columns,
        wanted.ctypes.data,
        wanted.size,
        None if factor is None else factor.ctypes.data,
        out.ctypes.data,
    )
    _raise_if_out_of_memory(fault)
    return out, fault


def _zeroed(size: int) -> Bytes:
    # Anonymous memory: page-aligned, zero, and given back to the system when the matrix goes.
    # Private, since Linux gives huge pages to private memory only.
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


def _raise_if_out_of_memory(fault: int) -> None:
    if fault == _OUT_OF_MEMORY:
        raise MemoryError("the native library could not get its scratch memory")
