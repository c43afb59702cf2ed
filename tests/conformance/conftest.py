"""The sides of a comparison on the CPU lane: the scalar reference and each instruction set."""

from __future__ import annotations

import platform

import pytest

INSTRUCTION_SETS = ["neon", "neon_dot"] if platform.machine() in ("aarch64", "arm64") else ["avx2", "avx512"]


@pytest.fixture(scope="session")
def library(request):
    from mens_cpu_ref.library import load_library
    from vox_plugin_api.backend import BackendError

    try:
        return load_library()
    except BackendError as problem:
        reason = f"mens-cpu-ref can't be used here: {problem}"
        if "mens-cpu-ref" in request.config.getoption("--require-backend"):
            pytest.fail(reason)
        pytest.skip(reason)


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
