"""What the lane asks of torch: a device's name, a compiler, the end of the queue, memory.

`TorchMps` is torch.mps. A program that plays the GPU implements `Runtime` too, and says so in `execution`:
the label goes into the load report and the handshake. One that is not on the GPU and has none is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Kernel", "Runtime", "TorchMps", "WorkingSet"]


class Kernel(Protocol):
    """A compiled kernel, as `torch.mps.compile_shader` hands it out."""

    thread_execution_width: int
    """Threads of a SIMD group."""
    max_threads_per_threadgroup: int

    def __call__(
        self,
        *arguments: Any,
        threads: tuple[int, int],
        group_size: tuple[int, int],
        arg_casts: str,
    ) -> None:
        """Queue it: tensors are bound as buffers, a list of ints becomes words of `arg_casts`."""
        ...


@dataclass(frozen=True, slots=True)
class WorkingSet:
    """The GPU's part of unified memory, in bytes."""

    limit: int
    """What Metal recommends as the most (recommendedMaxWorkingSetSize)."""
    held: int
    """What this process's Metal driver holds of it."""


class Runtime(Protocol):
    """torch.mps, or what stands in for it."""

    device: str
    """torch's name of the device."""
    execution: str
    """Where kernels run, if not on an Apple GPU: a label for every report; empty on one."""

    def compile(self, source: str) -> Mapping[str, Kernel]:
        """Compile a Metal source; return its kernels by name.

        Raises:
            SyntaxError: the compiler refused it; RuntimeError: another failure.
        """
        ...

    def working_set(self) -> WorkingSet:
        """Return what there is of memory now."""
        ...


class TorchMps:
    """torch.mps."""

    device = "mps"
    execution = ""

    def compile(self, source: str) -> Mapping[str, Kernel]:
        import torch

        library = torch.mps.compile_shader(source)
        return {name: getattr(library, name) for name in dir(library) if name.startswith("vox_")}

    def working_set(self) -> WorkingSet:
        import torch

        return WorkingSet(
            limit=int(torch.mps.recommended_max_memory()), held=int(torch.mps.driver_allocated_memory())
        )
