"""The GPU as a `grid_device.Device`: torch for memory and streams, the driver for launches.

Everything goes onto torch's current stream in the order of the calls; only `get` waits for it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import driver

from mens_core.grid_device import Launch
from mens_core.grid_ops import GridTensor
from mens_core.kernel_source import GROUP
from mens_torch_cuda.replay import UnrecordableError
from vox_plugin_api.backend import BackendError

__all__ = ["CudaDevice"]

_MOST_ROWS = 65535
"""Groups in y that a launch may have."""


class CudaDevice:
    """Memory and launches on the first GPU that this process sees.

    Buffers are torch tensors of bytes; one dies with its last reference, and torch then gives its
    memory to whoever asks next on the same stream, which is after every launch that uses it.
    """

    def __init__(self, cubin: bytes) -> None:
        """Load the kernels.

        Raises:
            BackendError: `kernels-not-loaded`: the driver refuses the machine code.
        """
        # The memory of torch and the code must belong to one context: torch makes it current here.
        torch.zeros(1, device="cuda")
        code, self._module = driver.cuModuleLoadData(cubin)
        if int(code) != 0:
            raise BackendError(
                "kernels-not-loaded",
                f"the NVIDIA driver refused the compiled kernels ({_error_name(code)}); "
                "the CUDA lane was not started",
                facts={"error": _error_name(code)},
                remedy="Update the NVIDIA driver to one at least as new as the plugin's NVRTC.",
            )
        self._functions: dict[str, Any] = {}
        runtime: Any = torch.cuda
        self._aside = runtime.Stream()
        self._is_capturing = False

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy an array there; it may be changed as soon as this returns."""
        buffer = self.empty(array.nbytes)
        self.write(buffer, array)
        return buffer

    def write(self, target: torch.Tensor, array: npt.NDArray[Any]) -> None:
        """Copy an array onto a buffer; it may be changed as soon as this returns."""
        if self._is_capturing:
            raise UnrecordableError("a copy from the host")
        source = np.ascontiguousarray(array)
        if source.nbytes:
            # Memory that is not pinned is copied aside before the call returns: nothing waits for the stream.
            self._check(
                driver.cuMemcpyHtoDAsync(target.data_ptr(), source.ctypes.data, source.nbytes, self._stream())
            )

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a buffer onto another."""
        target.copy_(source)

    def zeros(self, nbytes: int) -> torch.Tensor:
        """Return zeroed memory."""
        return self.empty(nbytes).zero_()

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return memory of any content.

        Raises:
            BackendError: `out-of-device-memory`.
        """
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            free, total = torch.cuda.mem_get_info()
            raise BackendError(
                "out-of-device-memory",
                f"the GPU has no room for {nbytes} bytes more; what asked for them was not done",
                facts={
                    "needed_bytes": nbytes,
                    "free_bytes": free,
                    "total_bytes": total,
                    "held_by_this_worker_bytes": torch.cuda.memory_allocated(),
                },
                remedy="Allow a smaller KV cache (memory_bytes) or free the GPU of other programs.",
            ) from None

    def part(self, buffer: torch.Tensor, first: int, nbytes: int) -> torch.Tensor:
        """Return a view."""
        return buffer.narrow(0, first, nbytes)

    def get(self, buffer: torch.Tensor, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """Copy back, and wait for it: the one call that does."""
        if self._is_capturing:
            raise UnrecordableError("a copy to the host")
        return buffer.cpu().numpy().view(dtype).reshape(shape)

    def launch(self, launch: Launch) -> None:
        """Queue a kernel."""
        across, rows = launch.threads
        if rows > _MOST_ROWS:
            raise ValueError(f"{launch.kernel}: {rows} rows in one launch, at most {_MOST_ROWS} are possible")
        count = len(launch.buffers)
        pointers = (ctypes.c_uint64 * count)(*(buffer.data_ptr() for buffer in launch.buffers))
        constants = ctypes.create_string_buffer(launch.constants, len(launch.constants))
        first = ctypes.addressof(pointers)
        places = [first + 8 * i for i in range(count)]
        parameters = (ctypes.c_void_p * (count + 1))(*places, ctypes.addressof(constants))
        groups = -(-across // GROUP)
        # The driver copies the parameters before it returns.
        self._check(
            driver.cuLaunchKernel(
                self._function(launch.kernel),
                groups,
                rows,
                1,
                GROUP,
                1,
                1,
                0,
                self._stream(),
                ctypes.addressof(parameters),
                0,
            )
        )

    def capture(self, call: Callable[[], GridTensor]) -> tuple[GridTensor, Callable[[], None]]:
        """Record the launches of `call` as a CUDA graph; see `replay.Capturing`."""
        graph = torch.cuda.CUDAGraph()
        current: Any = torch.cuda.current_stream()
        # A stream of its own: the current one may be the legacy stream, which can't be captured.
        self._aside.wait_stream(current)
        self._is_capturing = True
        try:
            with torch.cuda.stream(self._aside):
                graph.capture_begin(capture_error_mode="thread_local")
                try:
                    result = call()
                finally:
                    graph.capture_end()
        finally:
            self._is_capturing = False
            current.wait_stream(self._aside)
        return result, graph.replay

    def _function(self, name: str) -> Any:
        found = self._functions.get(name)
        if found is None:
            code, found = driver.cuModuleGetFunction(self._module, name.encode())
            self._check((code,))
            self._functions[name] = found
        return found

    def _stream(self) -> int:
        return torch.cuda.current_stream().cuda_stream

    def _check(self, result: tuple[Any, ...]) -> None:
        if int(result[0]) != 0:
            raise BackendError(
                "cuda-failed",
                f"the NVIDIA driver reported {_error_name(result[0])}; the step was not done",
                facts={"error": _error_name(result[0])},
                remedy="Restart the worker; if it happens again, look at the driver's log (dmesg, Xid).",
            )


def _error_name(code: Any) -> str:
    return str(getattr(code, "name", code))
