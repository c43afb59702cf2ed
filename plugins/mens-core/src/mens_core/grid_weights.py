"""Weights on a grid device: as they lie in the checkpoint, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device
from mens_core.ops import NOT_FINITE_REMEDY, Format, StoredTensor, is_quantised
from mens_core.stored_size import wrong_size
from vox_plugin_api.backend import BackendError

__all__ = ["Floats", "GridMatrix", "check_finite", "load_matrix", "stored_elements"]

Bytes = npt.NDArray[np.uint8]

_ELEMENTS: dict[str, tuple[type[np.generic], int]] = {
    "f32": (np.uint32, 0x7F800000),
    "f16": (np.uint16, 0x7C00),
    "bf16": (np.uint16, 0x7F80),
}
"""Bits of an element, and of its exponent."""

_BLOCKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "q8_0": (32, 34, (0,)),
    "q5_0": (32, 22, (0,)),
    "q4_0": (32, 18, (0,)),
    "q4_k": (256, 144, (0, 2)),
    "q5_k": (256, 176, (0, 2)),
    "q6_k": (256, 210, (208,)),
}
"""Weights and bytes of a block, and where its float16 scales lie."""


_F16_EXPONENT = 0x7C00
_PIECE = 1 << 17
"""Elements that are checked at once."""


@dataclass(frozen=True, slots=True, eq=False)
class GridMatrix:
    """A weight [rows, columns], row by row, in its format."""

    format: Format
    rows: int
    columns: int
    block: int
    """Columns that share a scale of the activations; 0 for float weights."""
    buffer: Buffer

    @property
    def nbytes(self) -> int:
        """Bytes of device memory."""
        return int(self.buffer.nbytes)


@dataclass(frozen=True, slots=True)
class Floats:
    """Where the floats lie in bytes that are blocks, one like the other."""

    block: int
    """Bytes of a block."""
    places: tuple[int, ...]
    """Of the floats in a block, in bytes."""
    size: int
    """Bytes of a float."""
    exponent: int
    """Bits of an exponent: all set in an infinity and a NaN."""


def load_matrix(device: Device, stored: StoredTensor) -> GridMatrix:
    """Copy a matrix to the device.

    A device with `put_finite(bytes, floats)` looks at the floats itself; it returns None in place of the
    buffer where one is not finite.

    Raises:
        BackendError: the bytes do not make the shape, or a weight or scale is not finite.
    """
    rows, columns = stored.shape if len(stored.shape) == 2 else (0, 0)
    look: Callable[[Bytes, Floats], Buffer | None] | None = getattr(device, "put_finite", None)
    if not is_quantised(stored.format):
        source = stored_elements(stored)
        if look is not None:
            kind, exponent = _ELEMENTS[stored.format]
            size = np.dtype(kind).itemsize
            buffer = look(source.view(np.uint8), Floats(size, (0,), size, exponent))
            return GridMatrix(stored.format, rows, columns, 0, _finite(buffer, stored))
        check_finite(source, stored)
        return GridMatrix(stored.format, rows, columns, 0, device.put(source))
    block, nbytes, scales = _BLOCKS[stored.format]
    if columns % block or rows * columns // block * nbytes != stored.data.nbytes or rows * columns == 0:
        raise wrong_size(stored, rows * columns // block * nbytes)
    blocks = np.frombuffer(stored.data, np.uint8)
    if look is not None:
        buffer = look(blocks, Floats(nbytes, scales, 2, _F16_EXPONENT))
        return GridMatrix(stored.format, rows, columns, block, _finite(buffer, stored))
    table = blocks.reshape(-1, nbytes)
    for at in scales:
        scale = np.ascontiguousarray(table[:, at : at + 2]).view(np.uint16)
        check_finite(scale, stored, exponent=_F16_EXPONENT)
    return GridMatrix(stored.format, rows, columns, block, device.put(table))


def _finite(buffer: Buffer | None, stored: StoredTensor) -> Buffer:
    if buffer is None:
        raise _not_finite(stored)
    return buffer


def stored_elements(stored: StoredTensor) -> npt.NDArray[Any]:
    """Return the elements of a float tensor as bits.

    Raises:
        BackendError: the tensor is quantised, or its bytes do not make the shape.
    """
    if is_quantised(stored.format):
        raise BackendError(
            "vector-format",
            f"tensor {stored.name!r} must be a float vector; no model was loaded",
            facts={"tensor": stored.name, "format": stored.format, "shape": list(stored.shape)},
            remedy="import the model again from its source",
        )
    kind = np.dtype(_ELEMENTS[stored.format][0])
    count = int(np.prod(stored.shape))
    if stored.data.nbytes != count * kind.itemsize or count == 0:
        raise wrong_size(stored, count * kind.itemsize)
    return np.frombuffer(stored.data, kind)


def check_finite(elements: npt.NDArray[Any], stored: StoredTensor, *, exponent: int | None = None) -> None:
    """Refuse a tensor with an infinity or NaN: an element whose exponent bits are all set.

    Raises:
        BackendError: `weights-not-finite`.
    """
    full = _ELEMENTS[stored.format][1] if exponent is None else exponent
    every = elements.reshape(-1)
    # Piece by piece: what is looked at is never laid beside the whole tensor.
    for first in range(0, every.size, _PIECE):
        if np.any((every[first : first + _PIECE] & every.dtype.type(full)) == full):
            raise _not_finite(stored)


def _not_finite(stored: StoredTensor) -> BackendError:
    return BackendError(
        "weights-not-finite",
        f"tensor {stored.name!r} holds an infinity or NaN; no model was loaded",
        facts={"tensor": stored.name},
        remedy=NOT_FINITE_REMEDY,
    )
