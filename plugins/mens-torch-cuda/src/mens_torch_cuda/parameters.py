"""What a launch hands over to the driver: where its buffers are, and its constants.

The driver wants an array of addresses of parameters. Both lie in memory of the host that is made once for
each number of buffers and written over again: the driver copies the parameters before a launch returns.
"""

from __future__ import annotations

import ctypes
from struct import Struct
from typing import Any

import torch

__all__ = ["Parameters", "Part"]

_CONSTANTS = 4096
"""Bytes that all parameters of a kernel have at most, by CUDA's own limit."""


class Part:
    """Some bytes of a buffer, as a buffer: what a launch needs of one, without a tensor of its own."""

    __slots__ = ("_address", "first", "nbytes", "whole")

    def __init__(self, whole: torch.Tensor, first: int, nbytes: int) -> None:
        """`whole` is held as long as this is there."""
        if not 0 <= first <= first + nbytes <= whole.nbytes:
            raise ValueError(f"bytes {first} to {first + nbytes} of a buffer of {whole.nbytes}")
        self.whole, self.first, self.nbytes = whole, first, nbytes
        self._address = whole.data_ptr() + first

    def data_ptr(self) -> int:
        """Where it begins."""
        return self._address

    def narrow(self, dim: int, first: int, nbytes: int) -> torch.Tensor:
        """Some of it, as torch has it, which calls it so."""
        return self.whole.narrow(dim, self.first + first, nbytes)

    def tensor(self) -> torch.Tensor:
        """It, as torch has it."""
        return self.narrow(0, 0, self.nbytes)


class Parameters:
    """Of one launch at a time."""

    def __init__(self) -> None:
        self._frames: dict[int, tuple[Any, int, int]] = {}
        self._layouts: dict[tuple[int, int], Struct] = {}

    def write(self, buffers: tuple[Any, ...], constants: bytes) -> int:
        """Write them; return the address of the array of their addresses, good until the next call."""
        count = len(buffers)
        frame = self._frames.get(count)
        if frame is None:
            frame = self._frames[count] = _frame(count)
        memory, values, address = frame
        layout = self._layouts.get((count, len(constants)))
        if layout is None:
            layout = self._layouts[count, len(constants)] = Struct(f"{count}Q{len(constants)}s")
        layout.pack_into(memory, values, *[buffer.data_ptr() for buffer in buffers], constants)
        return address


def _frame(count: int) -> tuple[Any, int, int]:
    """Memory, where the values begin in it, and its address: addresses of the values lie in front of them."""
    values = 8 * (count + 1)
    memory = ctypes.create_string_buffer(values + 8 * count + _CONSTANTS)
    address = ctypes.addressof(memory)
    addresses = [address + values + 8 * i for i in range(count + 1)]
    Struct(f"{count + 1}Q").pack_into(memory, 0, *addresses)
    return memory, values, address
