"""The CUDA lane that can also train, and serve adapters: the grid kernels of training beside its own."""

from __future__ import annotations

from mens_core.grid_device import Device
from mens_core.grid_training_ops import GridTrainingOps
from mens_torch_cuda.lane import CudaOps

__all__ = ["CudaTrainingOps"]


class CudaTrainingOps(CudaOps, GridTrainingOps):
    """Every operator of `TrainingOps` on a GPU; packed weights go backward piece by piece."""

    def __init__(self, device: Device, serving: CudaOps) -> None:
        """Take over the weights and rotary tables of a lane on the same device."""
        super().__init__(device, facts=serving.facts())
        # A table that it made is one that a recording must know before it begins.
        self._tables = serving._tables
