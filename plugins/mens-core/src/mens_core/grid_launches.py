"""How an operator over grid kernels launches: outputs, flags of rows, indices that a step uploads once."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device, Launch, constants
from mens_core.grid_flags import RowFlags
from mens_core.grid_tensors import GridTensor
from mens_core.ops import Batch, Fault

__all__ = ["GridLaunches", "alike"]

_MOST_ROWS = 65_535
"""Of a launch: CUDA's limit on the y axis."""


class GridLaunches:
    """A device with the flags and indices of the current step."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._watched = RowFlags(device)
        self._uploaded: dict[tuple[bytes, tuple[int, ...]], Buffer] = {}

    def to_host(self, x: GridTensor) -> npt.NDArray[np.float32]:
        """Copy back."""
        return self._device.get(x.buffer, np.float32, x.shape)

    def take_faults(self) -> list[Fault]:
        """Return what was not finite since the last call, first operator first."""
        self._uploaded.clear()
        return self._watched.take()

    def _new(self, *shape: int) -> GridTensor:
        """Return memory for a result."""
        return GridTensor(self._device.empty(4 * math.prod(shape)), shape)

    def _run(
        self,
        kernel: str,
        buffers: tuple[Buffer, ...],
        args: bytes,
        threads: tuple[int, int],
        shared: int = 0,
    ) -> None:
        if threads[1] > _MOST_ROWS:
            raise ValueError(f"{kernel}: {threads[1]} rows; a launch has at most {_MOST_ROWS}")
        if threads[0] and threads[1]:
            self._device.launch(Launch(kernel, buffers, args, threads, shared=shared))

    def _rows(
        self,
        kernel: str,
        buffers: tuple[Buffer, ...],
        shape: tuple[int, ...],
        args: bytes,
        name: str,
        across: int | None = None,
    ) -> GridTensor:
        """Run a kernel that writes `shape` and flags its rows, `across` threads a row."""
        rows, width = shape
        out = self._new(rows, width)
        flags = self._flags(name, rows)
        self._run(kernel, (*buffers, out.buffer, flags), args, (width if across is None else across, rows))
        return out

    def _elementwise(
        self, kernel: str, inputs: tuple[GridTensor, ...], value: float, name: str
    ) -> GridTensor:
        """Run a kernel with a thread for each element; the last axis is a row, whatever is before it."""
        shape = inputs[0].shape
        if any(x.shape != shape for x in inputs):
            alike(name, **{f"argument {i + 1}": x for i, x in enumerate(inputs)})
        rows, width = math.prod(shape[:-1]), shape[-1]
        out = self._new(*shape)
        buffers = (*(x.buffer for x in inputs), out.buffer, self._flags(name, rows))
        self._run(kernel, buffers, constants(rows, width, value), (rows * width, 1))
        return out

    def _flags(self, name: str, rows: int) -> Buffer:
        return self._watched.reserve(name, rows)

    def _ints(self, array: npt.NDArray[Any]) -> Buffer:
        """Copy indices there, each once a step: every layer asks for the same positions and tables."""
        ints = np.ascontiguousarray(array, np.int32)
        key = (ints.tobytes(), ints.shape)
        if key not in self._uploaded:
            self._uploaded[key] = self._device.put(ints)
        return self._uploaded[key]

    def _places(self, batch: Batch) -> tuple[Buffer, Buffer, Buffer]:
        """Positions, sequence of each row, block tables."""
        sequences = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
        return self._ints(batch.positions), self._ints(sequences), self._ints(batch.block_tables)


def alike(name: str, **tensors: GridTensor) -> tuple[int, ...]:
    """Return the shape of all of them.

    Raises:
        ValueError: they differ.
    """
    shapes = {key: tensor.shape for key, tensor in tensors.items()}
    if len(set(shapes.values())) != 1:
        raise ValueError(
            f"{name}: " + ", ".join(f"{key} {list(shape)}" for key, shape in shapes.items()) + " differ"
        )
    return next(iter(shapes.values()))
