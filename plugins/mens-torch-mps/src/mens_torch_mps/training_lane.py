"""The Metal lane that can also train, and serve adapters: the grid kernels of training beside its own."""

from __future__ import annotations

from mens_core.grid_training_ops import GridTrainingOps
from mens_torch_mps.device import MpsDevice
from mens_torch_mps.lane import MpsOps

__all__ = ["MpsTrainingOps"]


class MpsTrainingOps(MpsOps, GridTrainingOps):
    """Every operator of `TrainingOps` on a GPU."""

    def __init__(self, device: MpsDevice, serving: MpsOps) -> None:
        """Work on the weights that a lane on the same device has loaded."""
        super().__init__(
            device, simd_width=serving.simd_width, uses_matrices=serving.uses_matrices, facts=serving.facts()
        )
