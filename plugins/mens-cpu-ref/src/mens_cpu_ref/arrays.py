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

__all__ = ["AddressCache", "Rows", "WeightMemory", "address_of", "huge_zeros", "new_rows", "untouched_zeros"]

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


def huge_zeros(size: int) -> npt.NDArray[np.uint8]:
    """Return `size` zeroed bytes, page-aligned, in huge pages where the system has them."""
    # Anonymous: taken page by page as it is written, and given back with the last array over it.
    # Private, since Linux gives huge pages to private memory only.
    memory = mmap.mmap(-1, max(1, size), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, size)


class WeightMemory:
    """Zeroed memory for packed weights, one matrix behind the other in the order of loading.

    A step reads every weight once, in that order. Over small pages of its own for each matrix it
    read half as many bytes per second as over the huge pages that a large mapping gets.
    """

    __slots__ = ("_slab", "_taken")

    _SLAB_BYTES = 64 << 20
    _ALIGNMENT = 64

    def __init__(self) -> None:
        self._slab = np.empty(0, np.uint8)
        self._taken = 0

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        """Return `size` zeroed bytes, 64-byte aligned; they live as long as the array does."""
        if size > self._SLAB_BYTES // 4:
            return huge_zeros(size)
        if self._taken + size > self._slab.size:
            self._slab, self._taken = huge_zeros(self._SLAB_BYTES), 0
        piece = self._slab[self._taken : self._taken + size]
        self._taken += -(-size // self._ALIGNMENT) * self._ALIGNMENT
        return piece


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
