"""float32 tensors of the CPU lane: numpy arrays that know their address.

A decode step makes hundreds of native calls of a few microseconds; asking numpy for an address
costs as much as some of them, so it is asked once per array.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["AddressCache", "Rows", "address_of", "new_rows", "untouched_zeros"]

_FLOAT = np.dtype(np.float32)


class Rows:
    """A float32 array, C-contiguous, with the address of its first element."""

    __slots__ = ("address", "values")

    def __init__(self, values: npt.NDArray[np.float32]) -> None:
        self.values = values
        self.address = address_of(values)


def new_rows(count: int, width: int) -> Rows:
    """Return [count, width] of whatever was in memory."""
    return Rows(np.empty((count, width), _FLOAT))


def address_of(
    array: npt.NDArray[Any],
    *,
    _from_buffer: Any = ctypes.c_char.from_buffer,
    _addressof: Any = ctypes.addressof,
) -> int:
    """Return the address of the first element."""
    try:
        return int(_addressof(_from_buffer(array)))
    except (TypeError, ValueError):
        # Read-only, or empty.
        return array.ctypes.data


def untouched_zeros(count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return `count` zeros, page-aligned, that take memory page by page as they are written.

    numpy asks for huge pages, and a KV cache of which one position per block is written would
    then take 2 MiB for each.
    """
    kind = np.dtype(dtype)
    memory = mmap.mmap(-1, max(1, count * kind.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, kind, count)


class AddressCache:
    """Addresses of the index arrays of a step, which every layer passes again."""

    __slots__ = ("_known",)

    _MOST = 32

    def __init__(self) -> None:
        # The array itself is kept, so that its id stays its own.
        self._known: dict[int, tuple[npt.NDArray[np.int32], int, npt.NDArray[np.int32]]] = {}

    def __call__(self, array: npt.NDArray[np.int32]) -> int:
        """Return the address of the array as contiguous int32."""
        known = self._known.get(id(array))
        if known is not None and known[0] is array:
            return known[1]
        if len(self._known) >= self._MOST:
            self._known.clear()
        usable = np.ascontiguousarray(array, np.int32)
        address = address_of(usable)
        self._known[id(array)] = (array, address, usable)
        return address
