"""The lane on the CPU in an Apple GPU's place, and the scalar reference beside it."""

from __future__ import annotations

import pytest

from fixtures.native_library import native_library
from grid_shim import build as shim
from metal_shim.stand_in import CpuStandIn, fill_new_memory, started_on_cpu


@pytest.fixture(autouse=True)
def _filled_memory():
    fill_new_memory()
    yield
    fill_new_memory(False)


@pytest.fixture(scope="session")
def library(request):
    return native_library(request.config)


@pytest.fixture(scope="session")
def reference(library):
    from mens_cpu_ref.reference_lane import ReferenceOps

    return ReferenceOps


@pytest.fixture(scope="session")
def started():
    """Starts the lane; keywords are the stand-in's, `source` is another text of the kernels."""
    if shim.compiler() is None:
        pytest.skip("needs a C++ compiler or the ziglang wheel")

    def start(source=None, **stand_in):
        # A changed source runs a case or two: what counts is how soon it is compiled. It may be a part,
        # without the scalar kernels that tiles of matrices are compared with.
        level = {} if source is None else {"optimise": "-O0", "matrices": None}
        return started_on_cpu(CpuStandIn(**{**level, **stand_in}), source)

    return start
