"""What training in fast mode takes of memory, before it begins: by formula, not by running a step."""

from __future__ import annotations

import torch

from mens_core.micro_batches import cut
from mens_core.models.load import LoadedModel
from mens_core.training_plan import asked_of
from mens_torch_cuda.fast.memory import working_bytes
from mens_torch_cuda.fast.trainer import ROWS_AT_ONCE
from vox_plugin_api.backend import Reply
from vox_plugin_api.train_messages import TrainMemory, TrainPlanParams, TrainPlanResult

__all__ = ["plan_training"]

_RESERVE_BYTES = 512 << 20
"""Libraries' workspaces and what torch's allocator can't use."""


def plan_training(params: TrainPlanParams, loaded: LoadedModel, device: torch.device) -> Reply:
    """Say what would be trained, and the least that a step needs: every layer run a second time.

    Raises:
        BackendError: the adapter doesn't fit the model, or an example is longer than its context.
    """
    model = loaded.model
    config = model.config
    adapter, example = asked_of(params, model)
    size = params.micro_batch_size
    together = len(next(cut([example] * min(params.examples, size or 512), size, ROWS_AT_ONCE)))
    rows, numbers = example.rows * together, adapter.parameters
    kinds = {
        "weights": 2 * loaded.plan.parameters,
        # Values, their rounding, and the matrices of several layers side by side; old and new in the update.
        "adapter": (4 + 2 + 6 + 4) * numbers,
        "moments": 16 * numbers,
        "gradients": 12 * numbers,
        "activations": (config.layers + 3) * rows * config.hidden_size * 2,
        "workspace": working_bytes(config, rows),
        "reserve": _RESERVE_BYTES,
    }
    memory = TrainMemory(
        place="device" if device.type == "cuda" else "host",
        kinds=kinds,
        total=sum(kinds.values()),
        examples_at_once=together,
        rows_at_once=rows,
    )
    result = TrainPlanResult(
        matrices=[matrix.name for matrix in adapter.matrices], parameters=adapter.parameters
    )
    return Reply(result, memory.model_dump())
