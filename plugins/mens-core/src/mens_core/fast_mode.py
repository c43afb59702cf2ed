"""What a lane supplies to serve and train in numerics of its own (`fast`) beside the canonical ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_core.models.load import LoadedModel
from mens_core.serving import Service
from vox_plugin_api.backend import Reply

if TYPE_CHECKING:  # a worker that serves never loads them
    from mens_core.training import MakeTrainer
    from vox_plugin_api.train_messages import TrainPlanParams

__all__ = ["FastMode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FastMode:
    """A second way through the same engine, run directory and messages; nothing of it promises bits."""

    service: Service
    """Makes lanes for `load_model` with numerics "fast"."""
    make_trainer: MakeTrainer
    """Trains on a model that such a lane loaded."""
    answer_plan: Callable[[TrainPlanParams, LoadedModel], Reply]
    """Answers `train_plan` for such a model."""
