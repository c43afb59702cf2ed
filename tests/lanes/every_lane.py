"""The lanes that this machine can run, each by the name a test report shows.

A lane that can't be used is a visible skip with its reason, or a failure under
`--require-backend`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest

from lanes.float64_training_lane import Float64TrainingLane
from lanes.numpy_lane import NumpyLane
from lanes.numpy_training import NumpyTrainingLane, RowTrainingLane
from mens_core.ops import Ops
from mens_core.training_ops import TrainingOps
from vox_plugin_api.backend import BackendError

EXACT = ("mens-cpu-ref", "mens-cpu-ref:reference")
"""Lanes that promise bits."""


TRAINING = ("float64", "numpy", *EXACT)
"""Lanes that train; "rows" is the numpy lane whose bits depend on the row alone."""
Lane = TypeVar("Lane", bound=Ops)


def make_lane(name: str, config: pytest.Config) -> Ops:
    """Make a lane of this name, or skip (or fail) with the reason why not."""
    return _make(_MAKERS, name, config)


def make_training_lane(name: str, config: pytest.Config) -> TrainingOps:
    """Make a lane that trains, or skip (or fail) with the reason why not."""
    return _make(_TRAINING_MAKERS, name, config)


def _make(makers: dict[str, Callable[[], Lane]], name: str, config: pytest.Config) -> Lane:
    try:
        return makers[name]()
    except (ImportError, BackendError) as problem:
        reason = f"{name} can't be used here: {problem}"
        if name.split(":")[0] in config.getoption("--require-backend"):
            pytest.fail(reason)
        pytest.skip(reason)


def _cpu() -> Ops:
    from mens_cpu_ref.lane import CpuOps
    from mens_cpu_ref.library import load_library

    return CpuOps(load_library().kernels)


def _cpu_reference() -> Ops:
    from mens_cpu_ref.reference_lane import ReferenceOps

    return ReferenceOps()


def _cpu_training() -> TrainingOps:
    from mens_cpu_ref.library import load_library
    from mens_cpu_ref.training_lane import CpuTrainingOps

    return CpuTrainingOps(load_library())


def _cpu_reference_training() -> TrainingOps:
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    return ReferenceTrainingOps()


_TRAINING_MAKERS: dict[str, Callable[[], TrainingOps]] = {
    "float64": Float64TrainingLane,
    "numpy": NumpyTrainingLane,
    "rows": RowTrainingLane,
    "mens-cpu-ref": _cpu_training,
    "mens-cpu-ref:reference": _cpu_reference_training,
}
_MAKERS: dict[str, Callable[[], Ops]] = {
    "numpy": NumpyLane,
    "mens-cpu-ref": _cpu,
    "mens-cpu-ref:reference": _cpu_reference,
}
