"""A kernel that keeps subnormals, alone among kernels that flush them, fails the suite; kernel by kernel."""

from __future__ import annotations

import platform

import numpy as np
import pytest

from grid_shim import build as shim
from grid_shim.check import results
from grid_shim.device import KEPT, ShimDevice, native_angles
from mens_core.conformance import numpy_fma
from mens_core.conformance.cases_flushed import FLUSHED
from mens_core.conformance.cases_training_flushed import BACKWARD_FLUSHED, UPDATE_FLUSHED
from mens_core.conformance.numpy_fma import fma
from mens_core.conformance.planted_flush import keep_subnormals
from mens_core.conformance.planted_fma import NumpyFmaOps
from mens_core.conformance.planted_fma_training import with_training_fma
from mens_core.conformance.suite import outputs_of
from mens_core.grid_training_ops import GridTrainingOps
from mens_core.kernel_source import grid_source
from mens_core.ops import Ops
from mens_core.training_ops import TrainingOps

TRAINING = {**BACKWARD_FLUSHED, **UPDATE_FLUSHED}
EVERY = {**FLUSHED, **{f"training {name}": case for name, case in TRAINING.items()}}

COPIES = {"vox_kv_append", "vox_kv_take", "vox_turn"}
"""They compute nothing."""
UNSEEN = {
    "both": COPIES | {
        # A vector's subnormals are zero for every norm that reads it.
        "vox_widen_f32",
        # Exponentials of zero or less and their sums, each above 2^-126; the greatest of numbers that are
        # flushed; a loss, beside whose logarithm such numbers vanish.
        "vox_numerators", "vox_chunk_sums", "vox_chunks_folded", "vox_row_max", "vox_loss",
    },
    # What one of these writes is flushed where it is read, and it writes no result of an operator.
    "results": {
        "vox_attention_deltas", "vox_chunk_squares", "vox_quantise_32", "vox_quantise_256",
        # Integers; numbers that are no smaller than an operand; a scale times an integer, after which one
        # more operation flushes.
        "vox_argmax", "vox_token_weights", "vox_dropout",
        *(f"vox_linear{kind}_{f}" for kind in ("", "_tall") for f in
          ("q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")),
    },
    "operands": {
        # Its operands are scales and integers, chunks' sums, or what makes a subnormal result of them.
        "vox_chunk_squares", "vox_loss_gradient", "vox_softcap", "vox_token_weights",
        *(f"vox_linear{kind}_{f}" for kind in ("", "_tall") for f in
          ("q8_0", "q5_0", "q4_0", "q4_k", "q5_k", "q6_k")),
    },
}  # fmt: skip
"""Kernels whose mistake no byte of an operator's result can show, by what they keep, and why."""


def reached_by(lane: Ops, device: ShimDevice, cases, expected) -> dict[str, list[str]]:
    """Return the cases, which must be right, by the kernels that they reach."""
    reached: dict[str, list[str]] = {}
    for name, case in cases.items():
        launched: set[str] = set()
        device._watch = lambda launch, before, launched=launched: launched.add(launch.kernel)
        assert results(case, lane) == expected[name], name
        for kernel in launched:
            reached.setdefault(kernel, []).append(name)
    device._watch = None
    for kernel, names in reached.items():
        # First where its operator's name is in its own: that is where it should be seen.
        names.sort(key=lambda name, kernel=kernel: name.removeprefix("training ").split("/")[0] not in kernel)
    return reached


def unseen(lane: Ops, device: ShimDevice, cases, expected, reached, kept: str) -> set[str]:
    """Return the kernels that keep subnormals and give the same bytes."""
    found = set()
    for kernel, names in reached.items():
        with device.keeping(kernel, kept):
            if all(results(cases[name], lane) == expected[name] for name in names):
                found.add(kernel)
    return found


@pytest.fixture(scope="module")
def right(library):
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    return {name: results(case, ReferenceTrainingOps()) for name, case in EVERY.items()}


@pytest.fixture(scope="module")
def grid(library, shim_folder, right):
    """The lane of the common kernels, its device, and what reaches which kernel."""
    device = ShimDevice(shim.build(shim_folder, grid_source("metal"), "metal"))
    lane = GridTrainingOps(device, native_angles(library.reference))
    return lane, device, reached_by(lane, device, EVERY, right)


@pytest.mark.parametrize("kept", KEPT)
def test_each_kernel_that_keeps_subnormals_is_seen(grid, right, kept):
    if kept != "both" and platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("this machine flushes operands and results together")
    lane, device, reached = grid
    assert len(reached) > 70
    assert unseen(lane, device, EVERY, right, reached, kept) == UNSEEN["both"] | UNSEEN[kept]


@pytest.mark.parametrize("trains", [False, True], ids=["serving", "training"])
def test_each_kernel_of_the_cuda_lane_that_an_operator_reaches_is_seen(cuda_library, right, trains):
    from mens_torch_cuda.lane import CudaOps
    from mens_torch_cuda.training_lane import CudaTrainingOps

    device = ShimDevice(cuda_library)
    lane, cases = CudaOps(device, facts={}), FLUSHED
    if trains:
        lane, cases = CudaTrainingOps(device, lane), EVERY
    reached = reached_by(lane, device, cases, right)
    # Weights are laid out anew. Activations are quantised for products that read their scales as flushed;
    # that some are subnormal themselves, a lane that trains is shown. Exponentials of a difference that is
    # flushed are joined.
    expected = {name for name in reached if name.startswith("vox_pack_")} | (UNSEEN["both"] & reached.keys())
    expected |= {"vox_pairs_ends"} if trains else {"vox_quantise_32_wide", "vox_quantise_256_wide"}
    assert unseen(lane, device, cases, right, reached, "both") == expected
    assert len(reached.keys() - expected) > (60 if trains else 30)


@pytest.fixture(scope="module")
def reference(library) -> TrainingOps:
    from mens_cpu_ref.training_lane import ReferenceTrainingOps

    return ReferenceTrainingOps()


@pytest.mark.parametrize(
    "operator",
    ["linear", "rms_norm", "head_norm", "attention", "silu_gate", "gelu_gate", "softcap", "token_weights"],
)
def test_each_operator_that_keeps_subnormals_is_named(reference, right, operator):
    wrong = {
        name
        for name, case in FLUSHED.items()
        if [array.tobytes() for array in outputs_of(case, keep_subnormals(reference, operator))]
        != right[name]
    }
    assert {name.split("/")[0] for name in wrong} == (
        {operator, "linear_many"} if operator == "linear" else {operator}
    )


def test_every_operator_has_a_case_but_those_that_only_copy_or_choose():
    def operators(cases):
        return {name.split("/")[0] for name in cases}

    copies = {"take_rows", "kv_append", "put_rows"}
    serving = {"linear_many", *(name for name in Ops.__abstractmethods__ if not is_no_operator(name))}
    assert serving - operators(FLUSHED) == {*copies & serving, "argmax", "log_normaliser"}
    assert serving - operators(FLUSHED) - operators(UPDATE_FLUSHED) == {
        *copies & serving, "log_normaliser"
    }  # fmt: skip
    training = TrainingOps.__abstractmethods__ - Ops.__abstractmethods__ - {"from_host", "attention_saving"}
    assert training - operators(TRAINING) == {"put_rows"}


def is_no_operator(name: str) -> bool:
    return name.startswith(("load_", "new_", "to_", "take_faults", "rotary_"))


def test_no_chain_comes_into_the_excluded_interval(reference, right):
    """What lies between 2^-126 (1 - 2^-25) and 2^-126 is promised to nobody (docs/numerics.md, 1)."""
    asked = 0

    def watched(a, b, c):
        nonlocal asked
        with np.errstate(all="ignore"):
            # A product of two float32 is exact; what the sum loses is far below the interval's width.
            total = np.abs(np.asarray(a, np.float64) * np.asarray(b, np.float64) + np.asarray(c, np.float64))
        # Not what a masked or a flushed operand leaves alone.
        assert not ((total > 2.0**-126 * (1 - 2.0**-25)) & (total < 2.0**-126)).any()
        asked += total.size
        return fma(a, b, c)

    serving, training = NumpyFmaOps(reference, watched), with_training_fma(reference, watched)
    for name, case in EVERY.items():
        lane = training if name.startswith("training ") else serving
        assert [array.tobytes() for array in outputs_of(case, lane)] == right[name], name
    assert asked > 10_000
    assert numpy_fma.fma(2.0**-126, 0.5, 0).tolist() == 0
