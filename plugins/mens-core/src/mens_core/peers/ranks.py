"""What every rank of a training must agree on, and the parts of an adapter that cross at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mens_core.differentiate import score
from mens_core.micro_batches import Example, pack
from mens_core.models.model import Model
from mens_core.numerics import NUMERICS_VERSION
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendInfo

__all__ = ["facts_of_rank", "in_parts"]

_PROBE = 24
"""Tokens of the sequence that every rank runs before it may take part."""
_AT_ONCE = 32
"""Tensors in one transfer."""


def facts_of_rank(info: BackendInfo, model: Model, ops: TrainingOps, model_digest: str) -> dict[str, str]:
    """Return what must be the same on every rank, by name.

    The logits of a fixed sequence are among it: a rank with other weights, or a device that computes
    otherwise, is found before it has touched a gradient.
    """
    vocab = model.config.vocab_size
    tokens = tuple((7 * i + 1) % vocab for i in range(min(_PROBE, model.config.context_length)))
    micro = pack([Example(tokens, (len(tokens) - 1,))], 0, whole=True)
    ops.take_faults()
    steps, digest = score(model, ops, micro, digests=True), ""
    while True:
        try:
            next(steps)
        except StopIteration as stop:
            digest = stop.value[0].logits_digest
            break
    return {
        "plugin": f"{info.plugin_id} {info.plugin_version}",
        "lane": info.lane,
        "numerics": str(NUMERICS_VERSION),
        "model_digest": model_digest,
        "logits_digest": digest,
    }


def in_parts(shapes: Mapping[str, tuple[int, int]]) -> Iterator[list[str]]:
    """Yield the keys of an adapter as they cross together, in their order."""
    keys = list(shapes)
    for first in range(0, len(keys), _AT_ONCE):
        yield keys[first : first + _AT_ONCE]
