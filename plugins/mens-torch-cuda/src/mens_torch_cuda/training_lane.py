"""The CUDA lane that can also train: the operators that serve, and the grid kernels of training."""

from __future__ import annotations

from mens_core.grid_training_ops import GridTrainingOps
from mens_torch_cuda.lane import CudaOps

__all__ = ["CudaTrainingOps"]


class CudaTrainingOps(CudaOps, GridTrainingOps):
    """Every operator of `TrainingOps` on a GPU; packed weights are dequantised piece by piece."""
