"""Weights in the layout that `kernels/packed.h` reads, and the launches over them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mens_core.grid_device import Buffer, Device, Launch, constants
from mens_core.grid_weights import GridMatrix
from mens_core.kernel_source import GROUP
from mens_core.ops import Format
from vox_plugin_api.checkpoint import GGML_BLOCKS, QuantTensor

__all__ = [
    "OUTPUTS",
    "PackedMatrix",
    "bytes_more_than_in_file",
    "can_be_packed",
    "linear_launch",
    "packed",
]

OUTPUTS = 16
"""Outputs of a group of kernels/packed.h."""
_PADDED = 128
"""Rows are padded to a multiple of this: the outputs of the widest group."""
_ROWS = 8
_CHUNK_BLOCKS = 4
_MOST_PIECES = 65535
_COLUMNS: dict[str, int] = {"f16": 8, "bf16": 8, **dict.fromkeys(("q8_0", "q5_0", "q4_0"), 32)}
_COLUMNS |= dict.fromkeys(("q4_k", "q5_k", "q6_k"), 256)
"""Columns are a multiple of this, by format."""
_PACKED_AS: dict[str, Format] = {"q5_0": "q8_0", "q4_0": "q8_0", "q5_k": "q4_k"}
"""A code of fewer bits is one of more bits as well: the same kernels, the same sums."""
_SUPER = 256
_SIDE_BYTES = 32
"""Of a super-block: what is beside its codes."""
_BLOCK_BYTES = {32: 34, _SUPER: _SUPER + _SIDE_BYTES}
"""Of a packed block, by the weights in it."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedMatrix:
    """A weight [rows, columns] whose pieces of 16 bytes lie output beside output, eight by eight."""

    format: Format
    """As it is packed: the kernels' names have it."""
    rows: int
    columns: int
    block: int
    """Columns that share a scale of the activations; 0 for float weights."""
    padded: int
    """Rows, rounded up to whole groups."""
    buffers: tuple[Buffer, ...]
    """Pieces; for a quantised format also what scales them."""

    @property
    def nbytes(self) -> int:
        """What it takes on the device, padding included."""
        if not self.block:
            return 2 * self.padded * self.columns
        return self.padded * self.columns + _beside(self.padded, self.columns, self.block)


def _beside(padded: int, columns: int, block: int) -> int:
    """Bytes of what scales the codes; for blocks of 32, room for whole chunks: four are read at once."""
    blocks = columns // block
    if block == _SUPER:
        return padded * blocks * _SIDE_BYTES
    return 2 * padded * -(-blocks // _CHUNK_BLOCKS) * _CHUNK_BLOCKS


def bytes_more_than_in_file(tensors: Iterable[QuantTensor]) -> int:
    """Bytes that these tensors take packed, without padding, beyond what they take in their file."""
    more = 0
    for tensor in tensors:
        weights, in_file = GGML_BLOCKS[tensor.format]
        more += tensor.shape[0] * tensor.shape[1] // weights * (_BLOCK_BYTES[weights] - in_file)
    return more


def can_be_packed(matrix: GridMatrix) -> bool:
    """Whether there is a packed layout for it."""
    step = _COLUMNS.get(matrix.format)
    return step is not None and matrix.columns % step == 0 and matrix.columns // step <= _MOST_PIECES


def packed(device: Device, matrix: GridMatrix) -> PackedMatrix:
    """Pack a matrix on the device; the source's memory is free when its last reference goes."""
    padded = -(-matrix.rows // _PADDED) * _PADDED
    args = constants(matrix.rows, padded, matrix.columns)
    buffers: tuple[Buffer, ...]
    kernel, pieces = f"vox_pack_{matrix.format}", matrix.columns // (matrix.block or 8)
    if matrix.block:
        # Zeroed: not all of the room for whole chunks is written.
        beside = device.zeros(_beside(padded, matrix.columns, matrix.block))
        buffers = (device.empty(padded * matrix.columns), beside)
    else:
        kernel, buffers = "vox_pack_halves", (device.empty(2 * padded * matrix.columns),)
    device.launch(Launch(kernel, (matrix.buffer, *buffers), args, (padded, pieces)))
    format_ = _PACKED_AS.get(matrix.format, matrix.format)
    return PackedMatrix(format_, matrix.rows, matrix.columns, matrix.block, padded, buffers)


def linear_launch(weight: PackedMatrix, rows: int) -> tuple[str, bytes, tuple[int, int]]:
    """Return kernel, constants and threads of x W^T for so many rows."""
    together = 1 if rows == 1 else _ROWS
    args = constants(weight.rows, weight.columns, rows)
    threads = (-(-weight.rows // OUTPUTS) * GROUP, -(-rows // together))
    return f"vox_packed_{weight.format}_{together}", args, threads
