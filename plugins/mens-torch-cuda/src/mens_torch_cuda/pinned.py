"""Memory of the host that the GPU copies from by itself: `uploads.Carrier` on torch's current stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from cuda.bindings import driver

from mens_core.grid_weights import Bytes

__all__ = ["Pinned"]


class Pinned:
    """Pinned memory of the driver's, not of torch, which keeps it for its own next request."""

    def __init__(self, check: Callable[[tuple[Any, ...]], None], stream: Callable[[], int]) -> None:
        """`check` raises what a call of the driver reported; `stream` is the current one's handle."""
        self._check = check
        self._stream = stream
        self._taken = 0

    def pinned(self, nbytes: int) -> Bytes:
        """Take memory; once."""
        code, self._taken = driver.cuMemHostAlloc(nbytes, 0)
        self._check((code,))
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self._taken))

    def send(self, source: Bytes, target: torch.Tensor, first: int) -> Callable[[], None]:
        """Queue a copy onto bytes of `target`, from `first` on; what is returned waits for its end."""
        address = target.data_ptr() + first
        self._check(driver.cuMemcpyHtoDAsync(address, source.ctypes.data, source.nbytes, self._stream()))
        runtime: Any = torch.cuda
        event = runtime.Event()
        event.record()
        wait: Callable[[], None] = event.synchronize
        return wait

    def release(self) -> None:
        """Give the memory back."""
        self._check(driver.cuMemFreeHost(self._taken))
