"""From an adapter's tensors to those on a lane, and to the updates that a model runs with.

On a lane the A of an embedding lies turned, [tokens, rank]: its rows are looked up. Files,
digests and the host's copies have it as PEFT does, [rank, tokens].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from mens_core.adapters.keys import parameter_key
from mens_core.adapters.plan import AdapterPlan
from mens_core.models.linear import Lora
from mens_core.ops import Tensor
from mens_core.training_ops import AdapterOps
from vox_plugin_api.adapter_keys import EMBEDDING_LAYER

__all__ = ["all_from_lane", "from_lane", "lane_shapes", "make_loras", "to_lane"]

Floats = npt.NDArray[np.float32]

_TURNED = parameter_key(f"{EMBEDDING_LAYER}.lora_A")


def to_lane(ops: AdapterOps, tensors: Mapping[str, Floats]) -> dict[str, Tensor]:
    """Copy tensors, by their keys, to a lane."""
    return {key: ops.from_host(_turned(key, values)) for key, values in tensors.items()}


def from_lane(ops: AdapterOps, tensors: Mapping[str, Tensor]) -> Mapping[str, Floats]:
    """Return tensors on a lane as arrays, by their keys; each comes to the host when it is read."""
    return _FromLane(ops, tensors)


def all_from_lane(ops: AdapterOps, keys: Iterable[str], tensors: Sequence[Tensor]) -> dict[str, Floats]:
    """`from_lane` of all tensors at once: a lane may wait once for all of them."""
    held = ops.all_to_host(tensors)
    return {key: _turned(key, np.asarray(x, "<f4")) for key, x in zip(keys, held, strict=True)}


class _FromLane(Mapping[str, Floats]):
    """A step exchanges tensors and changes none, so no copy is needed."""

    def __init__(self, ops: AdapterOps, tensors: Mapping[str, Tensor]) -> None:
        self._ops, self._tensors = ops, tensors

    def __getitem__(self, key: str) -> Floats:
        return _turned(key, np.asarray(self._ops.to_host(self._tensors[key]), "<f4"))

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def lane_shapes(plan: AdapterPlan) -> dict[str, tuple[int, int]]:
    """Return the shape that each tensor has on a lane, by its key."""
    return {
        key: (columns, rows) if key == _TURNED else (rows, columns)
        for key, (rows, columns) in plan.shapes.items()
    }


def make_loras(
    ops: AdapterOps,
    plan: AdapterPlan,
    tensors: Mapping[str, Tensor],
    *,
    together: Sequence[Tensor] | None = None,
    values: Mapping[str, Floats] | None = None,
) -> dict[str, Lora]:
    """Return the updates by the names of their layers; later changes of the tensors don't show.

    Args:
        tensors: as `to_lane` made them.
        together: the tensors in that order, as `copies` or an operator of many returned them.
        values: what they hold, if that is known already.
    """
    loras = {}
    keys, every = list(tensors), list(tensors.values()) if together is None else together
    held = all_from_lane(ops, keys, every) if values is None else values
    made = dict(zip(keys, ops.matrices(every, keys), strict=True))
    for matrix in plan.matrices:
        key_a, key_b = matrix.keys
        loras[matrix.name] = Lora(
            a=made[key_a],
            b=made[key_b],
            rank=matrix.rank,
            scale=matrix.scale,
            number=matrix.number,
            is_zero=matrix.scale == 0 or not (held[key_a].any() and held[key_b].any()),
        )
    return loras


def _turned(key: str, values: Floats) -> Floats:
    return values.T if key == _TURNED else values
