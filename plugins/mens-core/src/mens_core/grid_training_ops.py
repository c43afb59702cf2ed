"""Every operator of training over the grid kernels: a lane trains from a device alone.

    class LaneTrainingOps(LaneOps, GridTrainingOps): ...

where `LaneOps` is a `GridOps` with faster kernels, or `GridTrainingOps(device, make_angles)` as it is.
Weights that the lane packs in its own way go through its `embed`, or a `_launch_linear_backward` of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from mens_core.grid_backward_ops import PIECE, GridBackwardOps
from mens_core.grid_update_ops import GridUpdateOps
from mens_core.ops import BLOCK
from mens_core.training_ops import TrainingOps

__all__ = ["GridTrainingOps"]


class GridTrainingOps(GridBackwardOps, GridUpdateOps, TrainingOps):
    """`TrainingOps` over a device, whose kernels are those of `grid_source(target)`."""

    memory_place: Literal["host", "device"] = "device"

    def workspace_bytes(self, *, lengths: Sequence[int], widest: int, kv_heads: int, head_dim: int) -> int:
        """Keys, values and queries in both orders with attention's deltas, or a piece of a packed weight."""
        attention = 4 * sum(lengths) * (4 * kv_heads * head_dim + 3 * widest)
        return max(attention, self._piece_bytes(widest))

    @staticmethod
    def _piece_bytes(widest: int) -> int:
        """What `linear_backward` dequantises at once, of a packed weight."""
        return 4 * max(PIECE, BLOCK * widest)
