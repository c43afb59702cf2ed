"""The lanes that a test runs on: the plain one always, an installed one when it is there."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lanes.row_lane import RowLane
from mens_core.ops import Ops
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import LoadModelParams

LANES = ["rows", "cpu-ref"]


def lane_factory(name: str) -> Callable[[LoadModelParams], Ops]:
    """Return the function that makes a lane; skips visibly when its plugin is not built here."""
    if name == "rows":
        return lambda params: RowLane()
    try:
        from mens_cpu_ref.lane import CpuOps
        from mens_cpu_ref.library import load_library

        kernels = load_library().kernels
    except (ImportError, BackendError) as error:
        pytest.skip(f"the CPU lane is not built here: {error}")
    return lambda params: CpuOps(kernels)
