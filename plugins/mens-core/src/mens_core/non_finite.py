"""What a run is told of a value that is not finite: which operator, and so which layer, came first. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from vox_plugin_api.adapter_keys import EMBEDDING_LAYER
from vox_plugin_api.backend import BackendError

__all__ = ["layer_of", "not_finite", "of_step"]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_HEAD = ("norm", "lm_head", "logit_softcap", "loss")


def layer_of(operator: str) -> int | str:
    """Return the number of the decoder layer that an operator is of, else "embedding", "head" or "update".

    Args:
        operator: the name under which it ran ("layers.3.mlp.gated.backward"), or an adapter's key.
    """
    found = _LAYER.search(operator)
    if found is not None:
        return int(found[1])
    stem = operator.removeprefix("base_model.model.").removeprefix("model.").partition(".")[0]
    if stem == EMBEDDING_LAYER:
        return "embedding"
    return "head" if stem in _HEAD else "update"


def not_finite(operator: str, facts: dict[str, object], where: str = "") -> BackendError:
    """Return the error; `facts` and `where` say whose rows."""
    layer = layer_of(operator)
    place = f"layer {layer}" if isinstance(layer, int) else f"the {layer}"
    return BackendError(
        "non-finite",
        f"{operator} is not finite{where}: the first such value, in {place}",
        facts={"operator": operator, "layer": layer, **facts},
    )


@contextmanager
def of_step(step: int) -> Iterator[None]:
    """Say of an error inside which step, counted from 1, was not taken."""
    try:
        yield
    except BackendError as error:
        found = error.error
        raise BackendError(
            found.code,
            f"step {step} was not taken and the adapter is unchanged: {found.message}",
            facts={**found.facts, "step": step},
            remedy=found.remedy,
        ) from error
