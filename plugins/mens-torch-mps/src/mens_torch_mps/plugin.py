"""The entry point of the plugin `mens-torch-mps` (group `vox_host.backends`)."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, cast

from vox_plugin_api.backend import Backend, BackendInfo

if TYPE_CHECKING:
    from mens_core.ops import Ops
    from mens_core.training_ops import TrainingOps
    from mens_torch_mps.lane import MpsOps
    from mens_torch_mps.start import Started
    from vox_plugin_api.messages import LoadModelParams, SelfTestResult

__all__ = ["backend", "backend_on"]

PLUGIN_ID = "mens-torch-mps"


def backend() -> Backend:
    """Return the Metal lane; the GPU is looked at and the kernels are compiled here.

    Raises:
        BackendError: there is no GPU that will do, or the kernels can't be built for it.
    """
    # numpy's matrix library is never called here; left alone it starts a thread for each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported when the worker calls, so that importing the entry point costs and breaks nothing.
    from mens_torch_mps.start import start

    return backend_on(start(os.environ))


def backend_on(started: Started) -> Backend:
    """Return the lane on a GPU that was started."""
    from mens_core.backend import MensBackend
    from mens_core.conformance.quick import self_test
    from mens_core.weights_fit import check_fit, weight_bytes

    def make_lane_for(params: LoadModelParams) -> Ops:
        if params.model_dir:
            memory = started.runtime.working_set()
            check_fit(
                weight_bytes(Path(params.model_dir)),
                free=memory.limit - memory.held,
                total=memory.limit,
                device=started.facts.get("device", "the GPU"),
                remedy="Take a smaller model, close other programs, or use the CPU lane.",
            )
        return started.lane()

    def free_bytes() -> int:
        memory = started.runtime.working_set()
        return memory.limit - memory.held

    def test_operators() -> SelfTestResult:
        return self_test(started.lane)

    def make_training_lane(serving: Ops) -> TrainingOps:
        return started.training_lane(cast("MpsOps", serving))

    info = BackendInfo(
        plugin_id=PLUGIN_ID,
        plugin_version=version(PLUGIN_ID),
        lane="metal",
        numerics=("canonical",),
        capabilities=("generate", "evaluate", "trace", "train", "adapters"),
        execution=started.runtime.execution,
    )
    return MensBackend(
        info,
        make_lane_for,
        test_operators,
        make_training_lane=make_training_lane,
        free_bytes=free_bytes,
    )
