"""torch.mps, played on the CPU: the lane's own Python over CPU tensors, its Metal source as C++.

The lane's modules are used as they are. What is replaced is what `mens_torch_mps.runtime.Runtime` names:
the device, the compiler, the memory. A kernel takes what torch's kernels take and refuses what they refuse.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grid_shim import build as shim
from grid_shim.device import LaunchError
from mens_core.kernel_source import GROUP
from mens_torch_mps.runtime import WorkingSet
from mens_torch_mps.start import Started, start_on

__all__ = ["CACHE", "LABEL", "CpuStandIn", "StandInKernel", "fill_new_memory", "started_on_cpu"]

LABEL = "executed on CPU, not on Apple hardware"
CACHE = Path(__file__).parents[2] / ".cache" / "metal_shim"
"""Compiled forms of the source, by all that decides their bytes."""

_CASTS = {"int32": np.int32}


class StandInKernel:
    """One kernel, called as torch's are."""

    def __init__(self, owner: CpuStandIn, library: ctypes.CDLL, name: str) -> None:
        self.name = name
        self.thread_execution_width = owner.told_simd or owner.simd
        self.max_threads_per_threadgroup = 1024
        self._owner = owner
        self._run, self._set_matrices = library.shim_run, library.shim_matrices

    def __call__(
        self, *arguments: Any, threads: tuple[int, int], group_size: tuple[int, int], arg_casts: str
    ) -> None:
        """Run the grid.

        Raises:
            LaunchError: the kernel left its buffers, raced, or lost a thread at a barrier.
        """
        if self._owner.change is not None:
            arguments = self._owner.change(self.name, arguments)
        bound = [self._bound(argument, arg_casts) for argument in arguments]
        if group_size != (GROUP, 1) or threads[0] % GROUP != 0 or min(threads) < 1:
            raise LaunchError(f"{self.name}: {threads} threads in groups of {group_size} are no whole groups")
        self._owner.launches += 1
        self._set_matrices(self._owner.matrices or 0)
        count = len(bound)
        pointers = (ctypes.c_void_p * count)(*(pointer for pointer, _, _ in bound))
        sizes = (ctypes.c_int64 * count)(*(size for _, size, _ in bound))
        message = ctypes.create_string_buffer(400)
        modes = (int(self._owner.at_end), self._owner.order, int(self._owner.flush), self._owner.simd)
        x, y = (ctypes.c_int64(n) for n in threads)
        code = self._run(self.name.encode(), pointers, sizes, count, x, y, *modes, message, len(message))
        if code != 0:
            raise LaunchError(message.value.decode())

    def _bound(self, argument: Any, cast: str) -> tuple[int, int, Any]:
        """Address and bytes of a buffer, and what keeps them."""
        if isinstance(argument, torch.Tensor):
            if not argument.is_contiguous():
                raise LaunchError(f"{self.name}: a buffer with gaps")
            return argument.data_ptr(), argument.nbytes, argument
        words = np.array(argument, np.int64)
        if not isinstance(argument, list) or words.ndim != 1 or not 0 < 4 * len(words) <= 4096:
            raise LaunchError(f"{self.name}: {argument!r} is no list of at most 1024 words")
        constants = words.astype(_CASTS[cast])
        if not np.array_equal(constants, words):
            raise LaunchError(f"{self.name}: a word does not fit {cast}")
        return constants.ctypes.data, constants.nbytes, constants


class CpuStandIn:
    """A `Runtime` on the CPU.

    Args:
        simd: threads of a SIMD group, as the kernels see them.
        told_simd: what the kernel objects say of it, where that is something else: a planted mistake.
        flush: whether subnormals are flushed, as others measured on Apple's GPUs (docs/numerics.md, 16).
        order, at_end: see `grid_shim.device.ShimDevice`.
        matrices: the number of the order in which SIMD-group matrices add (grid_shim/matrices.cpp); None:
            the compiler knows no such matrices.
        change: is given a kernel's name and arguments and returns others: a planted mistake.
        optimise: how the source is compiled.
    """

    device = "cpu"
    execution = LABEL

    def __init__(
        self,
        *,
        simd: int = 32,
        told_simd: int | None = None,
        flush: bool = True,
        order: int = 0,
        at_end: bool = True,
        matrices: int | None = 0,
        change: Callable[[str, tuple[Any, ...]], tuple[Any, ...]] | None = None,
        optimise: str = "-O1",
        folder: Path = CACHE,
    ) -> None:
        self.simd, self.told_simd, self.flush, self.order, self.at_end = simd, told_simd, flush, order, at_end
        self.matrices, self.change = matrices, change
        self.launches = 0
        self._optimise, self._folder = optimise, folder

    def compile(self, source: str) -> Mapping[str, StandInKernel]:
        source.encode("ascii")  # as torch hands it over
        if self.matrices is None and "simdgroup_float8x8" in source:
            raise SyntaxError("no type named 'simdgroup_float8x8' in namespace 'metal'")
        try:
            library = shim.build(self._folder, source, "metal", optimise=self._optimise)
        except RuntimeError as problem:
            raise SyntaxError(str(problem)) from None
        loaded = ctypes.CDLL(str(library))
        return {name: StandInKernel(self, loaded, name) for name in shim.kernel_names(source)}

    def working_set(self) -> WorkingSet:
        return WorkingSet(limit=8 << 30, held=0)


def fill_new_memory(is_on: bool = True) -> None:
    """Have torch fill what it allocates: bytes of 255, which as floats are NaN.

    What no kernel writes must not look like a result that lay there before.
    """
    torch.use_deterministic_algorithms(is_on)


def started_on_cpu(runtime: CpuStandIn | None = None, source: str | None = None) -> Started:
    """Start the lane on the CPU in the GPU's place."""
    facts = {"device": "the CPU in a GPU's place", "torch": str(torch.__version__)}
    return start_on(runtime or CpuStandIn(), facts, source)
