"""The sides of a comparison: the reference, each instruction set of the CPU, grid kernels on the shim."""

from __future__ import annotations

import os
import platform

import pytest

from fixtures.native_library import native_library
from grid_shim import build as shim
from grid_shim.check import ALL, results
from grid_shim.device import ShimDevice, native_angles
from mens_core.grid_training_ops import GridTrainingOps
from mens_core.kernel_source import CUDA_OPTIONS, grid_source

INSTRUCTION_SETS = ["neon", "neon_dot"] if platform.machine() in ("aarch64", "arm64") else ["avx2", "avx512"]


@pytest.fixture(scope="session")
def library(request):
    return native_library(request.config)


@pytest.fixture(scope="session", params=INSTRUCTION_SETS)
def isa(library, request):
    try:
        library.force_isa(request.param)
    except ValueError:
        pytest.skip(f"this machine has no {request.param}")
    library.force_isa("")
    return request.param


@pytest.fixture(scope="session")
def reference(library):
    from lanes.cpu_calls import Native

    return Native(library, None)


@pytest.fixture(scope="session")
def kernels(library, isa):
    """Makes the kernels' side for a number of threads."""
    from lanes.cpu_calls import Native

    return lambda threads: Native(library, isa, threads)


@pytest.fixture(scope="session")
def shim_folder(tmp_path_factory):
    if shim.compiler() is None:
        pytest.skip("needs a C++ compiler or the ziglang wheel")
    # One for all workers of a run: what is compiled is found by its text.
    own = tmp_path_factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "grid"


@pytest.fixture(scope="session")
def lane(library, shim_folder):
    """Makes the operators over a form of the grid kernels; by default as they are."""

    def make(target, source=None, options=CUDA_OPTIONS, *, optimise=None, **device):
        text = grid_source(target) if source is None else source
        # A changed source runs a case or two: what counts is how soon it is compiled.
        level = optimise or ("-O1" if source is None else "-O0")
        built = shim.build(shim_folder, text, target, options, optimise=level)
        return GridTrainingOps(ShimDevice(built, **device), native_angles(library.reference))

    return make


@pytest.fixture(scope="session")
def cuda_library(shim_folder):
    """All kernels of the CUDA lane, to run on the CPU."""
    from mens_torch_cuda.kernel_text import cuda_source

    return shim.build(shim_folder, cuda_source(), "cuda")


@pytest.fixture(scope="session")
def expected(library):
    """What the scalar reference gives, by the name of the case."""
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    known: dict[str, list[bytes]] = {}

    def of(name):
        if name not in known:
            known[name] = results(ALL[name], ReferenceTrainingOps())
        return known[name]

    return of
