"""The entry point of the plugin `mens-cpu-ref` (group `vox_host.backends`)."""

from __future__ import annotations

import os
from importlib.metadata import version

from vox_plugin_api.backend import Backend, BackendInfo

__all__ = ["backend"]

PLUGIN_ID = "mens-cpu-ref"


def backend() -> Backend:
    """Return the CPU lane; the native library is loaded here and refuses what can't run it."""
    # numpy's matrix library is never called here; left alone it starts a thread for each core.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Imported when the worker calls, so that importing the entry point costs and breaks nothing.
    from mens_core.backend import MensBackend
    from mens_core.conformance.quick import self_test
    from mens_core.ops import Ops
    from mens_core.training_ops import TrainingOps
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.threads import usable_threads
    from vox_plugin_api.messages import LoadModelParams, SelfTestResult

    library = load_library()

    def make_lane(threads: int | None) -> Ops:
        count = threads or usable_threads()
        library.set_threads(count)
        return CpuOps(library.kernels, facts={"instruction_set": library.isa(), "threads": count})

    def make_lane_for(params: LoadModelParams) -> Ops:
        return make_lane(params.threads)

    def make_training_lane(serving: Ops) -> TrainingOps:
        # Imported when training begins: a worker that serves binds none of its functions.
        from mens_cpu_ref.training_lane import CpuTrainingOps

        return CpuTrainingOps(library, facts=serving.facts())

    def test_operators() -> SelfTestResult:
        return self_test(lambda: make_lane(None))

    info = BackendInfo(
        plugin_id=PLUGIN_ID,
        plugin_version=version(PLUGIN_ID),
        lane="cpu",
        numerics=("canonical",),
        capabilities=("generate", "evaluate", "trace", "train"),
    )
    return MensBackend(info, make_lane_for, test_operators, make_training_lane=make_training_lane)
