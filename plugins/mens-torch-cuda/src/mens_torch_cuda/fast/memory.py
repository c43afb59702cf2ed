"""What a step takes of a device's memory, by formula: how many layers keep what their backward needs."""

from __future__ import annotations

import torch

from mens_torch_cuda.fast.loss import LOGIT_BYTES
from vox_plugin_api.families.model_config import ModelConfig

__all__ = ["kept_layers", "layer_bytes", "working_bytes"]


def layer_bytes(config: ModelConfig, rows: int) -> int:
    """What a layer keeps for its backward, beside its input."""
    heads, groups, width = config.heads, config.kv_heads, config.head_dim
    numbers = (heads + 2 * groups) * width  # q, k and v as the product made them
    numbers += (2 * heads + 2 * groups) * width  # rotated, and what attention made
    numbers += config.hidden_size * (3 if config.family == "gemma3" else 1)
    numbers += 2 * config.intermediate_size
    return rows * (2 * numbers + 4 * heads)


def working_bytes(config: ModelConfig, rows: int) -> int:
    """What one layer or a piece of the head takes while it runs, at most."""
    heads = (config.heads + 2 * config.kv_heads) * config.head_dim
    layer = rows * (24 * config.intermediate_size + 24 * config.hidden_size + 16 * heads)
    return max(layer + layer_bytes(config, rows), 4 * LOGIT_BYTES)


def kept_layers(
    config: ModelConfig,
    rows: int,
    device: torch.device,
    memory_bytes: int | None,
    *,
    recorded: int = 0,
) -> int:
    """Return how many layers may keep what they made.

    Args:
        memory_bytes: all that may be allocated; None: what is free on the device.
        recorded: what recordings hold, of the memory that torch has and nobody uses.
    """
    if device.type != "cuda":
        return config.layers
    held = torch.cuda.memory_allocated(device)
    if memory_bytes is None:
        free, _ = torch.cuda.mem_get_info(device)
        memory_bytes = held + (free + torch.cuda.memory_reserved(device) - held - recorded) * 9 // 10
    inputs = config.layers * rows * config.hidden_size * 2
    room = memory_bytes - held - inputs - working_bytes(config, rows)
    return max(0, min(config.layers, room // layer_bytes(config, rows)))
