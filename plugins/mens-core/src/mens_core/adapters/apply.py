"""From an adapter's tensors on a lane to the updates that a model runs with."""

from __future__ import annotations

from collections.abc import Mapping

from mens_core.adapters.keys import parameter_key
from mens_core.adapters.plan import AdapterPlan
from mens_core.models.linear import Lora
from mens_core.ops import Tensor
from mens_core.training_ops import TrainingOps

__all__ = ["make_loras"]


def make_loras(ops: TrainingOps, plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> dict[str, Lora]:
    """Return the updates by the names of their layers; later changes of the tensors don't show."""
    loras = {}
    for matrix in plan.matrices:
        key_a, key_b = (parameter_key(f"{matrix.name}.lora_{part}") for part in "AB")
        a, b = tensors[key_a], tensors[key_b]
        loras[matrix.name] = Lora(
            a=ops.matrix(a, name=key_a),
            b=ops.matrix(b, name=key_b),
            scale=plan.scale,
            number=matrix.number,
            is_zero=plan.scale == 0 or not (ops.to_host(a).any() and ops.to_host(b).any()),
        )
    return loras
