"""The CUDA plugin with its ranks on one GPU, for a machine that has no second one: gloo carries the bytes.

NCCL refuses two ranks on one GPU, so it is not what runs here; everything else is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from mens_core.backend import MensBackend
from mens_core.peers.wire import Place, Wire
from mens_core.training_ops import TrainingOps
from mens_torch_cuda import plugin

__all__ = ["backend"]

RANKS = 4


def backend() -> MensBackend:
    """Return the plugin's backend; what every rank runs, too."""
    made = plugin.backend()
    assert isinstance(made, MensBackend) and made.peers is not None
    made.peers = dataclasses.replace(
        made.peers,
        entry="gpu.shared_gpu:backend",
        devices=lambda: RANKS,
        environment=lambda rank: {},
        open_wire=_open_wire,
    )
    return made


def _open_wire(place: Place, ops: TrainingOps, look: Callable[[], None]) -> Wire:
    from mens_torch_cuda.wire import TorchWire

    return TorchWire(place, ops, look, kind="gloo")
