"""How an operator over grid kernels launches: outputs, flags of rows, indices that a step uploads once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Buffer, Device, Launch
from mens_core.grid_flags import RowFlags
from mens_core.grid_tensors import GridTensor
from mens_core.ops import Batch, Fault

__all__ = ["GridLaunches"]


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

    def _run(self, kernel: str, buffers: tuple[Buffer, ...], args: bytes, threads: tuple[int, int]) -> None:
        if threads[0] and threads[1]:
            self._device.launch(Launch(kernel, buffers, args, threads))

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
        out = GridTensor(self._device.empty(4 * rows * width), shape)
        flags = self._flags(name, rows)
        self._run(kernel, (*buffers, out.buffer, flags), args, (width if across is None else across, rows))
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
