"""From nothing to a lane: GPU, kernels, device; each step refuses with its reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mens_core.kernel_source import CUDA_OPTIONS
from mens_torch_cuda.compiler import Kernels, Nvrtc, cache_folder, compile_kernels
from mens_torch_cuda.gpu import Gpu, find_gpu
from mens_torch_cuda.kernel_text import cuda_source
from mens_torch_cuda.lane import CudaOps

__all__ = ["Started", "count_gpus", "free_memory", "start"]


@dataclass(frozen=True, slots=True)
class Started:
    """A GPU with the kernels on it."""

    gpu: Gpu
    kernels: Kernels
    device: Any

    def lane(self) -> CudaOps:
        """Return a fresh lane."""
        return CudaOps(self.device, facts=self.facts())

    def facts(self) -> dict[str, Any]:
        """What the load report tells; never compared."""
        return {
            "device": self.gpu.name,
            "compute_capability": self.gpu.capability_text,
            "torch": self.gpu.torch,
            "compiler": self.kernels.compiler,
            "kernel_source_sha256": self.kernels.source_digest,
            "kernel_cache": self.kernels.cache,
        }


def start(environment: Mapping[str, str]) -> Started:
    """Find the GPU, then compile the kernels for it and load them.

    Raises:
        BackendError: a step refused; its code says which.
    """
    gpu = find_gpu()
    kernels = compile_kernels(cuda_source(), CUDA_OPTIONS, gpu.capability, Nvrtc(), cache_folder(environment))
    from mens_torch_cuda.device import CudaDevice

    return Started(gpu, kernels, CudaDevice(kernels.cubin))


def free_memory() -> tuple[int, int]:
    """Return the GPU's free and total bytes."""
    import torch

    free, total = torch.cuda.mem_get_info()
    return int(free), int(total)


def count_gpus() -> int:
    """Return how many GPUs this process sees; what they can do is looked at by whoever uses one."""
    import torch

    return torch.cuda.device_count()
