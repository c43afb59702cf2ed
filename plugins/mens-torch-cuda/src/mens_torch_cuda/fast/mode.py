"""Fast mode as the backend takes it: lanes, trainer and memory, for one torch device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from mens_core.fast_mode import FastMode
from mens_core.models.load import LoadedModel
from mens_core.models.model import Model
from mens_core.ops import Ops
from mens_core.serving import Service
from mens_core.training_ops import AdapterOps
from mens_torch_cuda.fast.ops import FastOps
from vox_plugin_api.backend import Reply
from vox_plugin_api.messages import LoadModelParams

if TYPE_CHECKING:  # a worker that serves never loads them
    from mens_core.trainer import TrainerConfig, TrainerState
    from vox_plugin_api.train_messages import TrainPlanParams

__all__ = ["fast_mode"]

STEP_ROWS = 8192
"""A long prompt is read in few large products; answers in progress wait for one of them at most."""


def fast_mode(
    device: torch.device,
    *,
    facts: Mapping[str, Any],
    prepare: Callable[[LoadModelParams], None] = lambda params: None,
) -> FastMode:
    """Return fast mode on `device`.

    Args:
        facts: what the load report tells of the device.
        prepare: refuses a load that can't be, and readies the device for the first one.
    """

    def make_lane(params: LoadModelParams) -> Ops:
        prepare(params)
        return FastOps(device, facts={**facts, "weights": "bfloat16", "products": "bfloat16, float32 sums"})

    def make_adapting_lane(serving: Ops) -> AdapterOps:
        if not isinstance(serving, FastOps):
            raise AssertionError("fast mode adapts its own lanes")
        return serving

    def make_trainer(
        model: Model, config: TrainerConfig, state: TrainerState | None, size: int | None
    ) -> Any:
        # Imported when training begins.
        from mens_torch_cuda.fast.trainer import FastTrainer

        return FastTrainer(model, device, config, state=state, micro_batch_size=size)

    def answer_plan(params: TrainPlanParams, loaded: LoadedModel) -> Reply:
        from mens_torch_cuda.fast.plan import plan_training

        return plan_training(params, loaded, device)

    return FastMode(
        service=Service(
            make_lane=make_lane, make_adapting_lane=make_adapting_lane, kv_value_bytes=2, rows=STEP_ROWS
        ),
        make_trainer=make_trainer,
        answer_plan=answer_plan,
    )
