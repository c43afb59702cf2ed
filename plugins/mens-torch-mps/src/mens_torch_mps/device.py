"""The GPU as a `grid_device.Device`: torch for memory and the queue, kernels as torch compiled them.

torch keeps one command buffer open and adds every kernel to it; it is submitted when someone waits. Only
`get`, and `put` of more words than commands carry, wait: so a decode step is submitted once (one_read.py).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from mens_core.grid_device import Launch
from mens_core.kernel_source import GROUP
from mens_torch_mps.runtime import Kernel, Runtime
from vox_plugin_api.backend import BackendError

__all__ = ["MpsDevice"]

_MOST_ROWS = 65535
"""As on the other GPUs."""
_WORDS = 1000
"""A command carries at most 4096 bytes of constants."""
_MOST_COMMANDS = 64
"""More words than so many commands carry are copied, and that waits."""


class MpsDevice:
    """Memory and launches on the GPU of this Mac.

    Buffers are torch tensors of bytes; one dies with its last reference, and torch gives its memory to
    whoever asks next, which the queue orders after every kernel that uses it.
    """

    def __init__(self, runtime: Runtime, kernels: Mapping[str, Kernel]) -> None:
        """Take compiled kernels by name.

        Raises:
            BackendError: `not-on-gpu`: what torch allocates is not on the GPU, and no label says so.
        """
        self._runtime = runtime
        self._kernels = dict(kernels)
        found = self._tensor(4).device.type
        if found != "mps" and not runtime.execution:
            raise BackendError(
                "not-on-gpu",
                f"torch put the lane's memory on {found!r}, not on the GPU; the Metal lane was not started",
                facts={"expected": "mps", "found": found},
                remedy="Use the CPU lane; it has the bits of docs/numerics.md.",
            )

    def add_kernels(self, kernels: Mapping[str, Kernel]) -> None:
        """Take more kernels; those of training come when training begins."""
        self._kernels.update(kernels)

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy an array there; it may be changed as soon as this returns."""
        source = np.ascontiguousarray(array)
        buffer = self.empty(source.nbytes)
        if source.nbytes % 4 == 0 and source.nbytes <= 4 * _WORDS * _MOST_COMMANDS:
            self.write(buffer, source.reshape(-1).view(np.int32))
        else:
            # The array's own memory is what Metal reads: nothing is laid beside it.
            memory = (ctypes.c_ubyte * source.nbytes).from_address(source.ctypes.data)
            buffer[: source.nbytes].copy_(torch.frombuffer(memory, dtype=torch.uint8))
        return buffer

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        return self.empty(nbytes).zero_()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return memory of any content.

        Raises:
            BackendError: `out-of-device-memory`.
        """
        try:
            return self._tensor(nbytes)
        except RuntimeError as problem:
            # torch has no type of its own for it here: "MPS backend out of memory", "Invalid buffer size".
            if not any(words in str(problem).lower() for words in ("out of memory", "buffer size")):
                raise
            memory = self._runtime.working_set()
            raise BackendError(
                "out-of-device-memory",
                f"the GPU has no room for {nbytes} bytes more; what asked for them was not done",
                facts={
                    "needed_bytes": nbytes,
                    "limit_bytes": memory.limit,
                    "held_by_this_worker_bytes": memory.held,
                    "said": str(problem).splitlines()[0],
                },
                remedy="Allow a smaller KV cache (memory_bytes) or close other programs.",
            ) from None

    def part(self, buffer: torch.Tensor, first: int, nbytes: int) -> torch.Tensor:
        """Return a view."""
        return buffer.narrow(0, first, nbytes)

    def get(self, buffer: torch.Tensor, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Copy back, and wait for it: what submits the commands so far."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        out = torch.empty(count, dtype=torch.uint8)
        out.copy_(buffer[:count])
        array: npt.NDArray[Any] = out.numpy().view(dtype).reshape(shape)
        return array

    def launch(self, launch: Launch) -> None:
        """Queue a kernel."""
        across, rows = launch.threads
        if rows > _MOST_ROWS:
            raise ValueError(f"{launch.kernel}: {rows} rows in one launch, at most {_MOST_ROWS} are possible")
        words = np.frombuffer(launch.constants, np.int32).tolist()
        # Whole groups: one that is cut short would wait at its barriers for threads that are not there.
        self._kernels[launch.kernel](
            *launch.buffers,
            words,
            threads=(-(-across // GROUP) * GROUP, rows),
            group_size=(GROUP, 1),
            arg_casts="int32",
        )

    def write(self, buffer: torch.Tensor, words: npt.NDArray[np.int32]) -> None:
        """Write words with the commands, however many: nothing waits."""
        for first in range(0, len(words), _WORDS):
            part = words[first : first + _WORDS]
            self._kernels["vox_write_words"](
                self.part(buffer, 4 * first, 4 * len(part)),
                [len(part), *part.tolist()],
                threads=(-(-len(part) // GROUP) * GROUP, 1),
                group_size=(GROUP, 1),
                arg_casts="int32",
            )

    def _tensor(self, nbytes: int) -> torch.Tensor:
        # Metal has no buffer without a byte.
        return torch.empty(max(nbytes, 4), dtype=torch.uint8, device=self._runtime.device)
