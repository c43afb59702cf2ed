"""The GPU as a `grid_device.Device`: torch for memory and streams, the driver for launches.

Everything goes onto torch's current stream in the order of the calls; only `get` waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from cuda.bindings import driver

from mens_core.grid_device import Launch
from mens_core.grid_weights import Bytes, Floats
from mens_torch_cuda.compiler import HOPPER
from mens_torch_cuda.finite import are_finite
from mens_torch_cuda.nodes import UnrecordableError
from mens_torch_cuda.parameters import Parameters, Part
from mens_torch_cuda.pinned import Pinned
from mens_torch_cuda.uploads import PIECE, Uploads
from vox_plugin_api.backend import BackendError

__all__ = ["CudaDevice", "starts_early"]

_PINNED = 1 << 20
"""Bytes from which on a copy to the host is worth memory that the GPU writes by itself."""
_MOST_ROWS = 65535
"""Groups in y that a launch may have."""
_FETCHED = 1 << 20
"""Bytes of the host that recordings copy to, half of them for each side."""
_KEPT_SHARED = 4096
"""Bytes of shared memory that a kernel declares beside what is asked for at its launch, at most."""
_EARLY_START = (9, 0)
"""Compute capability from which a kernel can start while the one before it ends."""
_WAITING = "vox_step_"
"""Kernels of this name wait themselves for what is written before them (kernels/step.h)."""
_TILES = "vox_step_tiles"
"""Those that make several rows."""


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
        self._asked: dict[str, int] = {}
        """Bytes of shared memory that a kernel may be given at its launch, beyond its own."""
        self._parameters = Parameters()
        runtime: Any = torch.cuda
        self._aside = runtime.Stream()
        self._is_capturing = False
        self._graphs: _Graphs | None = None
        """What is being captured."""
        # Pinned, and made now: no memory of the host can be pinned while a graph is captured.
        self._on_host = torch.empty(_FETCHED, dtype=torch.uint8, pin_memory=True)
        self._uploads: Uploads | None = None
        self._fetched, self._fetch_end = 0, 0
        self._marks = (runtime.Event(), runtime.Event())
        self.most_shared = int(runtime.get_device_properties(0).shared_memory_per_block_optin) - _KEPT_SHARED
        """Bytes of shared memory that a launch may ask for."""
        self._number = int(runtime.current_device())
        capability = runtime.get_device_capability()
        self._starts_early = capability >= _EARLY_START
        self.has_warpgroups = capability == HOPPER
        """Whether four warps multiply matrices from memory that they have in common."""

    def put(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """Copy an array there; it may be changed as soon as this returns."""
        buffer = self.empty(array.nbytes)
        self.write(buffer, array)
        return buffer

    def write(self, target: torch.Tensor | Part, array: npt.NDArray[Any]) -> None:
        """Copy an array onto a buffer; it may be changed as soon as this returns."""
        if self._is_capturing:
            raise UnrecordableError("a copy from the host")
        source = np.ascontiguousarray(array)
        if source.nbytes:
            # Memory that is not pinned is copied aside before the call returns: nothing waits for the stream.
            self._check(
                driver.cuMemcpyHtoDAsync(target.data_ptr(), source.ctypes.data, source.nbytes, self._stream())
            )

    def put_finite(self, source: Bytes, floats: Floats) -> torch.Tensor | None:
        """Copy the bytes of a weight there, which may be unmapped as soon as this returns.

        None: an infinity or NaN is among its floats, looked at on the GPU.
        """
        buffer = self.empty(source.nbytes)
        if source.nbytes < PIECE:
            self.write(buffer, source)
        else:
            if self._uploads is None:
                self._uploads = Uploads(Pinned(self._check, self._stream))
            self._uploads.copy(source, buffer)
        return buffer if are_finite(buffer, floats) else None

    def end_uploads(self) -> None:
        """Give back the memory of the host that weights were copied through."""
        if self._uploads is not None:
            self._uploads.close()
            self._uploads = None

    def fetch(self, buffer: torch.Tensor | Part, nbytes: int) -> npt.NDArray[np.int32]:
        """Record a copy to the host; every recording of a side uses the same memory there.

        Raises:
            UnrecordableError: it does not fit there.
        """
        first, self._fetched = self._fetched, self._fetched + -(-nbytes // 16) * 16
        if self._fetched > self._fetch_end:
            raise UnrecordableError("more than is kept for copies to the host")
        target = self._on_host[first : first + nbytes]
        self._check(driver.cuMemcpyDtoHAsync(target.data_ptr(), buffer.data_ptr(), nbytes, self._stream()))
        return target.numpy().view(np.int32)

    def mark(self, side: int) -> None:
        """Remember, as this side's, what was launched so far."""
        self._marks[side].record()

    def wait(self, side: int) -> None:
        """Wait for what was launched before this side's mark."""
        self._marks[side].synchronize()

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
            if self._is_capturing:
                raise self._no_room(nbytes) from None
        # Torch keeps what was let go, for its own next request of that size.
        torch.cuda.empty_cache()
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError:
            raise self._no_room(nbytes) from None

    @staticmethod
    def _no_room(nbytes: int) -> BackendError:
        free, total = torch.cuda.mem_get_info()
        return BackendError(
            "out-of-device-memory",
            f"the GPU has no room for {nbytes} bytes more; what asked for them was not done",
            facts={
                "needed_bytes": nbytes,
                "free_bytes": free,
                "total_bytes": total,
                "held_by_this_worker_bytes": torch.cuda.memory_allocated(),
            },
            remedy="Allow a smaller KV cache (memory_bytes) or free the GPU of other programs.",
        )

    def part(self, buffer: torch.Tensor | Part, first: int, nbytes: int) -> Part:
        """Return some of a buffer."""
        if isinstance(buffer, Part):
            return Part(buffer.whole, buffer.first + first, nbytes)
        return Part(buffer, first, nbytes)

    def get(
        self, buffer: torch.Tensor | Part, dtype: npt.DTypeLike, shape: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        """Copy back, and wait for it: the one call that does."""
        if self._is_capturing:
            raise UnrecordableError("a copy to the host")
        there = buffer.tensor() if isinstance(buffer, Part) else buffer
        # Torch pins such memory once and hands it out again; it is its again when the array is gone.
        here = torch.empty(
            there.nbytes, dtype=torch.uint8, pin_memory=there.is_cuda and there.nbytes >= _PINNED
        )
        return here.copy_(there).numpy().view(dtype).reshape(shape)

    def are_zero(self, parts: Sequence[tuple[torch.Tensor, int]]) -> bool:
        """Whether the first so many int32 of each buffer are zero: the GPU looks, and one byte comes."""
        if self._is_capturing:
            raise UnrecordableError("a copy to the host")
        found = [buffer.narrow(0, 0, 4 * count).any() for buffer, count in parts]
        return not found or not bool(torch.stack(found).any())

    def launch(self, launch: Launch) -> None:
        """Queue a kernel."""
        across, rows = launch.threads
        if rows > _MOST_ROWS:
            raise ValueError(f"{launch.kernel}: {rows} rows in one launch, at most {_MOST_ROWS} are possible")
        groups = -(-across // launch.group)
        function, stream = self._function(launch.kernel), self._stream()
        # The driver copies the parameters before it returns.
        arguments = self._parameters.write(launch.buffers, launch.constants)
        if launch.shared:
            self._allow_shared(function, launch)
        is_early = self._starts_early and starts_early(launch.kernel, rows)
        if self._graphs is not None and not is_early:
            self._graphs.count()
        if is_early:
            self._check(driver.cuLaunchKernelEx(_early(launch, groups, rows, stream), function, arguments, 0))
        else:
            self._check(
                driver.cuLaunchKernel(
                    function, groups, rows, 1, launch.group, 1, 1, launch.shared, stream, arguments, 0
                )
            )

    def capture(
        self, call: Callable[[], None], side: int = 0, piece: int = 0
    ) -> tuple[Callable[[], None], ...]:
        """Record the launches of `call` as CUDA graphs; see `replay.Capturing`."""
        graphs = _Graphs(piece)
        current: Any = torch.cuda.current_stream()
        # A stream of its own: the current one may be the legacy stream, which can't be captured.
        self._aside.wait_stream(current)
        self._is_capturing, self._graphs = True, graphs
        self._fetched, self._fetch_end = _FETCHED // 2 * side, _FETCHED // 2 * (side + 1)
        try:
            with torch.cuda.stream(self._aside):
                graphs.begin()
                try:
                    call()
                finally:
                    graphs.end()
        finally:
            self._is_capturing, self._graphs = False, None
            current.wait_stream(self._aside)
        return tuple(graph.replay for graph in graphs.made)

    def _allow_shared(self, function: Any, launch: Launch) -> None:
        """Let the kernel have so much shared memory, if it was not allowed before."""
        if launch.shared > self._asked.get(launch.kernel, 0):
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._check(driver.cuFuncSetAttribute(function, attribute, launch.shared))
            self._asked[launch.kernel] = launch.shared

    def _function(self, name: str) -> Any:
        found = self._functions.get(name)
        if found is None:
            code, found = driver.cuModuleGetFunction(self._module, name.encode())
            self._check((code,))
            self._functions[name] = found
        return found

    def _stream(self) -> int:
        return int(_raw_stream(self._number))

    def _check(self, result: tuple[Any, ...]) -> None:
        if int(result[0]) != 0:
            raise BackendError(
                "cuda-failed",
                f"the NVIDIA driver reported {_error_name(result[0])}; the step was not done",
                facts={"error": _error_name(result[0])},
                remedy="Restart the worker; if it happens again, look at the driver's log (dmesg, Xid).",
            )


class _Graphs:
    """A capture in graphs of so many launches; all of them use one pool of memory, in their order."""

    def __init__(self, piece: int) -> None:
        self.made: list[torch.cuda.CUDAGraph] = []
        self._piece, self._launched = piece, 0
        self._pool: Any = torch.cuda.graph_pool_handle()

    def begin(self) -> None:
        """Begin a graph."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        self.made.append(graph)
        self._launched = 0

    def end(self) -> None:
        """End the one that was begun last."""
        self.made[-1].capture_end()

    def count(self) -> None:
        """Note a launch that is about to be made; it begins a graph where the last one is whole."""
        if self._piece and self._launched == self._piece:
            self.end()
            self.begin()
        self._launched += 1


def starts_early(kernel: str, rows: int) -> bool:
    """Whether a launch with so many rows of groups may begin before the kernel in front of it has ended.

    One row's may. Groups of several rows would be put onto the multiprocessors that are free first, several
    on one of them, where a launch by itself spreads them: steps of 32 and 64 rows took 5 to 27 % longer.
    """
    return kernel.startswith(_WAITING) and rows == 1 and not kernel.startswith(_TILES)


def _stream_of(number: int) -> int:
    return int(torch.cuda.current_stream(number).cuda_stream)


_raw_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)
"""The current stream of a device: torch's own compiler asks so, at a tenth of the time for a `Stream`."""


def _early(launch: Launch, groups: int, rows: int, stream: int) -> Any:
    """A launch that may begin before the kernel in front of it has ended, in clusters of so many groups."""
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = groups, rows, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.group, 1, 1
    config.sharedMemBytes, config.hStream = launch.shared, driver.CUstream(stream)
    attributes = [attribute]
    if launch.together > 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        sides = (launch.together, 1, 1)
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = sides
        attributes.append(cluster)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


def _error_name(code: Any) -> str:
    return str(getattr(code, "name", code))
