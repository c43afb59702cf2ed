"""Which tensor of the base model each adapted layer belongs to. Reads headers, no weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vox_host.errors import ModelError
from vox_plugin_api.checkpoint import Checkpoint, CheckpointError, read_json_object
from vox_plugin_api.families import parse_config, plan_tensors
from vox_plugin_api.families.tensors import EMBEDDING, HEAD, stored_tensors

__all__ = ["base_key_map"]


def base_key_map(layers: Sequence[str], model_dir: Path) -> dict[str, str]:
    """Return the checkpoint's name of each layer's matrix; of a tied head, the embedding's.

    Args:
        layers: names as `TrainBeginResult.matrices` has them.
        model_dir: the base model's directory.

    Raises:
        ModelError: the directory can't be read, or has no such layer.
    """
    try:
        config = parse_config(read_json_object(model_dir / "config.json"))
        checkpoint = Checkpoint.open(model_dir)
        plan = plan_tensors(config, stored_tensors(checkpoint), source=str(model_dir))
        checkpoint.close()
    except CheckpointError as error:
        raise ModelError(
            error.code, error.message, facts=list(error.facts.items()), remedy=error.remedy
        ) from None
    names = {}
    for layer in layers:
        weight = f"{layer}.weight"
        if weight == HEAD and HEAD not in plan.tensors:
            weight = EMBEDDING
        if weight not in plan.tensors:
            raise ModelError(
                "adapter-layer",
                f"{model_dir} has no layer {layer!r}; nothing was written",
                facts=[("layer", layer), ("expected", f"a tensor {plan.prefix}{weight}")],
                remedy="Take the base model that the adapter was trained on.",
            )
        names[layer] = plan.tensors[weight].name
    return names
