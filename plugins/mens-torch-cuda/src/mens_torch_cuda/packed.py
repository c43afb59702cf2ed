"""Weights in the layout that `kernels/packed.h` reads, and the launches over them."""

from __future__ import annotations

from dataclasses import dataclass

from mens_core.grid_device import Buffer, Device, Launch, constants
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import Format

__all__ = ["OUTPUTS", "PackedMatrix", "can_be_packed", "linear_launch", "packed"]

OUTPUTS = 16
"""Outputs of a group of kernels/packed.h."""
_PADDED = 64
"""Rows are padded to a multiple of this: the outputs of the widest group."""
_ROWS = 8
_CHUNK_BLOCKS = 4
_MOST_PIECES = 65535
_COLUMNS: dict[str, int] = {"f16": 8, "bf16": 8, "q8_0": 32}
"""Columns are a multiple of this, by format."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight [rows, columns] whose pieces of 16 bytes lie output beside output, eight by eight."""

    format: Format
    rows: int
    columns: int
    block: int
    """Columns that share a scale of the activations; 0 for float weights."""
    padded: int
    """Rows, rounded up to whole groups."""
    buffers: tuple[Buffer, ...]
    """Pieces; for a quantised format also the scales."""

    @property
    def nbytes(self) -> int:
        """What it takes on the device, padding included."""
        if not self.block:
            return 2 * self.padded * self.columns
        return self.padded * self.columns + _scale_bytes(self.padded, self.columns // self.block)


def _scale_bytes(padded: int, blocks: int) -> int:
    """Room for the scales of whole chunks: four at a time are read."""
    return 2 * padded * -(-blocks // _CHUNK_BLOCKS) * _CHUNK_BLOCKS


def can_be_packed(matrix: GridMatrix) -> bool:
    """Whether there is a packed layout for it."""
    step = _COLUMNS.get(matrix.format)
    return step is not None and matrix.columns % step == 0 and matrix.columns // step <= _MOST_PIECES


def packed(device: Device, matrix: GridMatrix) -> PackedMatrix:
    """Pack a matrix on the device; the source's memory is free when its last reference goes."""
    padded = -(-matrix.rows // _PADDED) * _PADDED
    args = constants(matrix.rows, padded, matrix.columns)
    buffers: tuple[Buffer, ...]
    if matrix.block:
        blocks = matrix.columns // matrix.block
        scales = device.zeros(_scale_bytes(padded, blocks))
        buffers = (device.empty(padded * matrix.columns), scales)
        kernel, pieces = "vox_pack_q8_0", blocks
    else:
        buffers = (device.empty(2 * padded * matrix.columns),)
        kernel, pieces = "vox_pack_halves", matrix.columns // 8
    device.launch(Launch(kernel, (matrix.buffer, *buffers), args, (padded, pieces)))
    return PackedMatrix(matrix.format, matrix.rows, matrix.columns, matrix.block, padded, buffers)


def linear_launch(weight: PackedMatrix, rows: int) -> tuple[str, bytes, tuple[int, int]]:
    """Return kernel, constants and threads of x W^T for so many rows."""
    together = 1 if rows == 1 else _ROWS
    args = constants(weight.rows, weight.columns, rows)
    threads = (-(-weight.rows // OUTPUTS) * GROUP, -(-rows // together))
    return f"vox_packed_{weight.format}_{together}", args, threads
