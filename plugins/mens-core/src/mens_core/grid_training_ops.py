"""Every operator of training over the grid kernels: a lane trains from a device alone.

    class LaneTrainingOps(LaneOps, GridTrainingOps): ...

where `LaneOps` is a `GridOps` with faster kernels, or `GridTrainingOps(device, make_angles)` as it is.
Weights that the lane packs in its own way need `_launch_linear_backward` beside `_launch_linear`.
"""

from __future__ import annotations

from mens_core.grid_backward_ops import GridBackwardOps
from mens_core.grid_update_ops import GridUpdateOps
from mens_core.training_ops import TrainingOps

__all__ = ["GridTrainingOps"]


class GridTrainingOps(GridBackwardOps, GridUpdateOps, TrainingOps):
    """`TrainingOps` over a device, whose kernels are those of `grid_source(target)`."""
