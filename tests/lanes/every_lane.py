"""The lanes that this machine can run, each by the name a test report shows.

A lane that can't be used is a visible skip with its reason, or a failure under
`--require-backend`.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lanes.numpy_lane import NumpyLane
from mens_core.ops import Ops
from vox_plugin_api.backend import BackendError

EXACT = ("mens-cpu-ref", "mens-cpu-ref:reference")
"""Lanes that promise bits."""


def make_lane(name: str, config: pytest.Config) -> Ops:
    """Make a lane of this name, or skip (or fail) with the reason why not."""
    try:
        return _MAKERS[name]()
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


_MAKERS: dict[str, Callable[[], Ops]] = {
    "numpy": NumpyLane,
    "mens-cpu-ref": _cpu,
    "mens-cpu-ref:reference": _cpu_reference,
}
