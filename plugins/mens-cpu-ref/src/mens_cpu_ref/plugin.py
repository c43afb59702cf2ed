"""The entry point of the plugin `mens-cpu-ref` (group `vox_host.backends`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING

from vox_plugin_api.backend import Backend, BackendError, BackendInfo

if TYPE_CHECKING:
    from mens_cpu_ref.library import Function, Library

__all__ = ["backend"]

PLUGIN_ID = "mens-cpu-ref"
REFERENCE = "reference"
"""Value of the lane option `isa` that stands for the scalar reference."""


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
    from mens_cpu_ref.main_memory import free_bytes
    from mens_cpu_ref.threads import usable_threads
    from vox_plugin_api.messages import LoadModelParams, SelfTestResult

    library = load_library()

    def make_lane(threads: int | None, options: Mapping[str, str]) -> Ops:
        functions, name = _choose(library, options)
        count = threads or usable_threads()
        library.set_threads(count)
        return CpuOps(functions, facts={"instruction_set": name, "threads": count})

    def make_lane_for(params: LoadModelParams) -> Ops:
        return make_lane(params.threads, params.lane_options)

    def make_training_lane(serving: Ops) -> TrainingOps:
        # Imported when training begins or an adapter is served: others bind none of its functions.
        from mens_cpu_ref.training_lane import CpuTrainingOps, ReferenceTrainingOps

        if serving.facts().get("instruction_set") == REFERENCE:
            return ReferenceTrainingOps()
        return CpuTrainingOps(library, facts=serving.facts())

    def test_operators() -> SelfTestResult:
        return self_test(lambda: make_lane(None, {}))

    info = BackendInfo(
        plugin_id=PLUGIN_ID,
        plugin_version=version(PLUGIN_ID),
        lane="cpu",
        numerics=("canonical",),
        capabilities=("generate", "evaluate", "trace", "train", "adapters"),
    )
    return MensBackend(
        info,
        make_lane_for,
        test_operators,
        make_training_lane=make_training_lane,
        free_bytes=free_bytes,
        lane_options={"isa": (REFERENCE, *_available(library))},
    )


def _choose(library: Library, options: Mapping[str, str]) -> tuple[Mapping[str, Function], str]:
    """Return the functions that the lane options ask for, and the name of what runs them.

    The instruction set holds for the whole process, as a worker serves one model.

    Raises:
        BackendError: `lane-option`, naming the options and values that there are.
    """
    wanted = options.get("isa", "")
    try:
        library.force_isa("" if wanted == REFERENCE else wanted)
    except ValueError as problem:
        raise BackendError(
            "lane-option",
            f"{problem}; nothing was loaded",
            facts={
                "found": dict(options),
                "known": {"isa": [REFERENCE, *_available(library)]},
            },
            remedy="Leave the option out: the lane then takes the best instruction set of this machine.",
        ) from None
    return (library.reference, REFERENCE) if wanted == REFERENCE else (library.kernels, library.isa())


def _available(library: Library) -> list[str]:
    """Return the instruction sets that this machine has; the choice is the best one afterwards."""
    found = []
    for name in ("avx2", "avx512", "neon", "neon_dot"):
        with contextlib.suppress(ValueError):
            library.force_isa(name)
            found.append(name)
    library.force_isa("")
    return found
