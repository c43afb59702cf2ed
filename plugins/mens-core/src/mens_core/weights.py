"""Hand the tensors of a checkpoint to a lane, as `vox_plugin_api.families.tensors` planned them.

What is not planned is never read, except the few numbers of an `inv_freq` (`inv_freq.py`).
"""

from __future__ import annotations

import functools

from mens_core.models.linear import Linear
from mens_core.ops import Matrix, Ops, StoredTensor, Tensor
from vox_plugin_api.checkpoint import Checkpoint
from vox_plugin_api.families import ModelConfig, TensorPlan
from vox_plugin_api.families.tensors import PlannedTensor

__all__ = ["Weights"]


class Weights:
    """Planned tensors on their way into one lane."""

    def __init__(self, config: ModelConfig, plan: TensorPlan, checkpoint: Checkpoint, ops: Ops) -> None:
        self._plan = plan
        self._checkpoint = checkpoint
        self._ops = ops
        self._norms_plus_one = config.norm_plus_one and not checkpoint.quant_metadata.norms_include_one

    def matrix(self, name: str) -> Matrix:
        """Load the matrix called `name` ("layers.0.mlp.up_proj", without ".weight")."""
        tensor = self._plan.tensors[f"{name}.weight"]
        loaded = self._ops.load_matrix(self._stored(tensor))
        self._checkpoint.release(tensor.name)
        return loaded

    def linear(self, name: str) -> Linear:
        """Load the matrix called `name` as a linear layer of that name."""
        rows, columns = self._plan.tensors[f"{name}.weight"].shape
        return Linear(name, self.matrix(name), (rows, columns))

    def norm(self, name: str) -> Tensor:
        """Load the weight of the norm called `name`, with the family's 1 added if it lacks it."""
        tensor = self._plan.tensors[f"{name}.weight"]
        return self._ops.load_vector(self._stored(tensor), plus_one=self._norms_plus_one)

    def _stored(self, tensor: PlannedTensor) -> StoredTensor:
        return StoredTensor(
            tensor.name,
            tensor.format,
            tensor.shape,
            self._checkpoint.data(tensor.name),
            functools.partial(self._checkpoint.release, tensor.name),
        )
