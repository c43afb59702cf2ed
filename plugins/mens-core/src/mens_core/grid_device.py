"""What a lane that runs the grid kernels must bring: memory, and a way to launch.

A `Launch` says all there is to say about one kernel call in plain data, so a device can be CUDA,
Metal, or a program that plays one on the CPU.
"""

from __future__ import annotations

import struct
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mens_core.kernel_source import GROUP

__all__ = ["Buffer", "Device", "Launch", "constants"]

Buffer = Any
"""Memory of a device; opaque here."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One call of a grid kernel."""

    kernel: str
    """Name in the source."""
    buffers: tuple[Buffer, ...]
    """In the order of the kernel's parameters."""
    constants: bytes
    """The kernel's struct of `kernels/grid/args.h`, the parameter after the buffers."""
    threads: tuple[int, int]
    """How many threads in x and y; neither is 0. A device rounds x up to whole groups of
    `kernel_source.GROUP`, and the kernel ignores what is too much."""
    _: KW_ONLY
    together: int = 1
    """Groups side by side in x that a device with such clusters starts so; a kernel does without."""
    shared: int = 0
    """Bytes of a group's memory in common beyond what the kernel declares."""
    group: int = GROUP
    """Threads of a group, in place of `kernel_source.GROUP`."""


class Device(Protocol):
    """Memory and launches of one device; calls take effect in the order they are made."""

    def put(self, array: npt.NDArray[Any]) -> Buffer:
        """Copy an array there."""

    def zeros(self, nbytes: int) -> Buffer:
        """Return zeroed memory, aligned for any element."""

    def empty(self, nbytes: int) -> Buffer:
        """Return memory of any content, aligned for any element: for what a kernel writes whole."""

    def part(self, buffer: Buffer, first: int, nbytes: int) -> Buffer:
        """Return some bytes of a buffer, as a buffer over the same memory; `first` is a multiple of 16."""

    def get(self, buffer: Buffer, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Copy an array back, after all launches so far."""

    def launch(self, launch: Launch) -> None:
        """Run a kernel, after all launches so far."""


@lru_cache(maxsize=1 << 13, typed=True)
def constants(*values: int | float) -> bytes:
    """Pack a struct of four-byte fields: int32 for ints, float32 for floats."""
    codes = "".join("f" if isinstance(value, float) else "i" for value in values)
    return struct.pack("<" + codes, *(float(np.float32(v)) if isinstance(v, float) else v for v in values))
