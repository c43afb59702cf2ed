"""A `grid_device.Device` that runs the kernels on the CPU, for tests."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mens_core.grid_device import Launch
from mens_core.kernel_source import GROUP

__all__ = ["KEPT", "LaunchError", "ShimDevice", "native_angles"]

Bytes = npt.NDArray[np.uint8]

_BOTH = 1
KEPT = {"both": 0, "results": 2, "operands": 3}
"""Which subnormals a kernel that flushes too little keeps; one alone is possible on x86-64 only."""


class LaunchError(Exception):
    """A kernel touched memory that is not its own, or lost a thread at a barrier."""


class ShimDevice:
    """Buffers are byte arrays; a launch copies them into guarded memory and back.

    Args:
        library: what `build.build` made.
        flush: whether subnormals are flushed, as on every GPU that we support.
        order: in which the threads of a group run between barriers: 0 ascending, 1 descending.
        at_end: which side of a buffer is guarded to the byte.
        simd: threads of a SIMD group.
        watch: told of every launch after it ran, with the buffers as they were before.
    """

    def __init__(
        self,
        library: Path,
        *,
        flush: bool = True,
        order: int = 0,
        at_end: bool = True,
        simd: int = 32,
        watch: Callable[[Launch, list[Bytes]], None] | None = None,
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        self._run = self._library.shim_run
        self._asks: dict[str, tuple[range, int]] = {}
        self._modes = (int(at_end), order)
        self._flush, self._simd = _BOTH if flush else KEPT["both"], simd
        self._keeping: tuple[str, int] | None = None
        self._watch = watch

    def put(self, array: npt.NDArray[Any]) -> Bytes:
        return np.frombuffer(bytearray(np.ascontiguousarray(array).tobytes()), np.uint8)

    def zeros(self, nbytes: int) -> Bytes:
        return np.zeros(nbytes, np.uint8)

    def empty(self, nbytes: int) -> Bytes:
        # What no kernel writes must not look like a result: as floats these are NaN.
        return np.full(nbytes, 0xFF, np.uint8)

    def part(self, buffer: Bytes, first: int, nbytes: int) -> Bytes:
        return buffer[first : first + nbytes]

    def get(self, buffer: Bytes, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return buffer.view(dtype).reshape(shape).copy()

    @contextmanager
    def without_barrier(self, number: int) -> Iterator[None]:
        """Run with one barrier of a source taken away, whose barriers ask `is_kept`."""
        self._library.shim_without(number)
        try:
            yield
        finally:
            self._library.shim_without(-1)

    @contextmanager
    def keeping(self, kernel: str, kept: str) -> Iterator[None]:
        """Run with one kernel that keeps subnormals: "operands", "results" or "both"."""
        self._keeping = (kernel, KEPT[kept])
        try:
            yield
        finally:
            self._keeping = None

    def barriers_met(self) -> set[int]:
        """Return the barriers that threads came to since the last call, where barriers ask `is_kept`."""
        return {number for number in range(64) if self._library.shim_met(number)}

    def _said(self, kernel: str) -> tuple[range, int]:
        """Bytes of shared memory that the launch may give, and threads of a group, by the kernel's text."""
        if kernel not in self._asks:
            most = self._number(f"{kernel}_asks_at_most", 0)
            exact = self._number(f"{kernel}_asks", 0)
            asks = range(1, most + 1) if most else range(exact, exact + 1)
            self._asks[kernel] = (asks, self._number(f"{kernel}_threads", GROUP))
        return self._asks[kernel]

    def _number(self, name: str, otherwise: int) -> int:
        try:
            return ctypes.c_int32.in_dll(self._library, name).value
        except ValueError:
            return otherwise

    def launch(self, launch: Launch) -> None:
        asks, threads = self._said(launch.kernel)
        if launch.shared not in asks or launch.group != threads:
            raise LaunchError(
                f"{launch.kernel}: launched with {launch.shared} bytes of shared memory and groups of "
                f"{launch.group}, its text wants {asks[0]} to {asks[-1]} and {threads}"
            )
        before = [buffer.copy() for buffer in launch.buffers] if self._watch is not None else []
        buffers = [*launch.buffers, np.frombuffer(bytearray(launch.constants), np.uint8)]
        count = len(buffers)
        pointers = (ctypes.c_void_p * count)(*(buffer.ctypes.data for buffer in buffers))
        sizes = (ctypes.c_int64 * count)(*(buffer.nbytes for buffer in buffers))
        message = ctypes.create_string_buffer(400)
        x, y = (ctypes.c_int64(n) for n in launch.threads)
        flush = self._flush
        if self._keeping is not None and self._keeping[0] == launch.kernel:
            flush = self._keeping[1]
        modes = (*self._modes, flush, self._simd)
        code = self._run(launch.kernel.encode(), pointers, sizes, count, x, y, *modes, message, len(message))
        if code != 0:
            raise LaunchError(message.value.decode())
        if self._watch is not None:
            self._watch(launch, before)


def native_angles(functions: Any) -> Callable[[npt.NDArray[np.uint64], int, int], npt.NDArray[np.float32]]:
    """`MakeAngles` over the CPU lane's native functions."""

    def make(frequencies: npt.NDArray[np.uint64], factor: int, first: int) -> npt.NDArray[np.float32]:
        pairs = len(frequencies)
        table = np.empty((128, 2, pairs), np.float32)
        low = (1 << 64) - 1
        functions["rotary"](
            frequencies.ctypes.data, pairs, factor & low, factor >> 64, first, 128, table.ctypes.data
        )
        return table

    return make
