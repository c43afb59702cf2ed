"""Flushing, the caller's floating-point environment, faults, ranges and threads of the CPU lane."""

from __future__ import annotations

import ctypes
import ctypes.util
import os
import platform
import sys

import numpy as np
import pytest

from lanes.cpu_calls import Native, Step, assert_same

ONE_ROW = np.array([[1.0]], np.float32)
SIDES = ["reference", "kernels"]


@pytest.fixture(params=SIDES)
def side(request, reference, kernels) -> Native:
    return reference if request.param == "reference" else kernels(1)


def product(side: Native, a: float, b: float) -> int:
    """Bits of fma(a, b, +0)."""
    out, _ = side.linear(np.array([[a]], np.float32), np.array([[b]], np.float32), "f32")
    return int(out.view(np.uint32)[0, 0])


# --- flush to zero ---------------------------------------------------------------------------


def test_subnormal_results_become_zero_of_their_sign(side):
    assert product(side, 2.0**-70, 2.0**-70) == 0x00000000
    assert product(side, -(2.0**-70), 2.0**-70) == 0x80000000
    a, b = np.float32([[1.5 * 2.0**-126]]), np.float32([[-(2.0**-126)]])
    assert side.elementwise("add", a, b)[0].view(np.uint32)[0, 0] == 0


def test_subnormal_inputs_count_as_zero(side):
    assert product(side, 2.0**-130, 2.0**100) == 0
    smallest = np.array([[2.0**-130]], np.float32)
    assert side.elementwise("add", smallest, np.float32([[2.0**-126]]))[0] == np.float32(2.0**-126)


def test_subnormal_weights_are_flushed_as_they_are_loaded(side):
    values = np.array([2.0**-130, -(2.0**-130), 2.0**-126], np.float32)
    assert side.widen(values, "f32", False)[0].view(np.uint32).tolist() == [0, 0x80000000, 0x00800000]


def test_subnormal_halves_are_numbers(side):
    # The smallest float16, 2^-24, is an ordinary float32.
    assert side.widen(np.array([1, 0x8001], np.uint16), "f16", False)[0].tolist() == [2.0**-24, -(2.0**-24)]


def test_the_excluded_interval_just_below_the_smallest_normal(side):
    """[2^-126 (1 - 2^-25), 2^-126): x86 rounds before it looks for a tiny result, Arm after.

    Outside the claim of equal bits; what this machine does is recorded here.
    """
    tiny = product(side, (1 + 2.0**-13) * 2.0**-63, (1 - 2.0**-13) * 2.0**-63)  # 2^-126 (1 - 2^-26)
    assert tiny == (0 if platform.machine() in ("aarch64", "arm64") else 0x00800000)
    # The next float below it is outside the interval, and zero everywhere.
    assert product(side, (1 - 2.0**-24) * 2.0**-63, 2.0**-63) == 0


# --- the caller's environment ----------------------------------------------------------------


@pytest.fixture
def libm():
    name = ctypes.util.find_library("m")
    if sys.platform != "linux" or name is None:
        pytest.skip("reads fenv_t as glibc lays it out")
    return ctypes.CDLL(name)


def environment(libm) -> bytes:
    """MXCSR on x86, FPCR on Arm."""
    memory = ctypes.create_string_buffer(64)
    assert libm.fegetenv(memory) == 0
    return (
        memory.raw[:4]
        if platform.machine() == "aarch64"
        else bytes(
            # The exception flags (the low six bits) are history, not mode.
            [memory.raw[28] & 0xC0, *memory.raw[29:32]]
        )
    )


def test_the_callers_environment_comes_back(side, libm):
    before = environment(libm)
    x = np.random.default_rng(0).standard_normal((3, 5000)).astype(np.float32)
    side.elementwise("silu_gate", x, x)
    side.linear(x[:, :130].copy(), x[:, :130].copy(), "f32")
    assert environment(libm) == before
    # And Python's own subnormals still work.
    assert 2.0**-1040 * 0.5 == 2.0**-1041 != 0


def test_the_callers_rounding_mode_changes_no_bit(side, libm):
    upward = 0x400000 if platform.machine() == "aarch64" else 0x800
    x = np.random.default_rng(0).standard_normal((3, 700)).astype(np.float32)
    expected = side.elementwise("gelu_gate", x, x)
    assert libm.fesetround(upward) == 0
    try:
        found = side.elementwise("gelu_gate", x, x)
        assert libm.fegetround() == upward
    finally:
        libm.fesetround(0)
    assert_same(found, expected)


def test_every_thread_flushes(kernels):
    # Enough parts that each of four threads takes some.
    x = np.full((64, 4096), 1.5 * 2.0**-126, np.float32)
    y = np.full_like(x, -(2.0**-126))
    out, _ = kernels(4).elementwise("add", x, y)
    assert not out.view(np.uint32).any()


# --- faults and ranges -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("column", [0, 16, 36])
def test_the_first_row_that_is_not_finite_is_named(side, bad, row, column):
    x = np.random.default_rng(1).standard_normal((4, 37)).astype(np.float32)
    weight = np.random.default_rng(2).standard_normal((19, 37)).astype(np.float32)
    x[row, column] = x[3, 5] = bad
    assert side.elementwise("add", x, x)[1] == 1 + row
    assert side.linear(x, weight, "f32")[1] == 1 + row
    assert side.norm(x, weight[0].copy(), 1, 1e-6)[1] == 1 + row
    if not np.isneginf(bad):  # a logit of minus infinity is a weight of 0
        assert side.log_normaliser(x)[1] == 1 + row
    table = np.ones((1, 128, 2, 1), np.float32)
    slots, positions = np.zeros(1, np.int32), np.arange(4, dtype=np.int32)
    rotated = side.rope(x[:, 1:].copy(), 18, table, slots, positions)
    assert rotated[1] == (4 if column == 0 else 1 + row)


def test_an_overflowing_sum_of_squares_does_not_hide_behind_a_zero(side):
    x = np.full((2, 40), 1e-3, np.float32)
    x[1] = 1e30
    out, code = side.norm(x, np.ones(40, np.float32), 1, 1e-6)
    assert code == 2
    assert np.isfinite(out[0]).all()
    assert np.isnan(out[1]).all()


def test_a_weight_that_is_not_finite_is_refused_with_its_row(side):
    for name, bits, kind in (
        ("f32", 0x7F800000, np.uint32),
        ("f16", 0xFC01, np.uint16),
        ("bf16", 0x7F80, np.uint16),
    ):
        weight = np.zeros((40, 3), kind)
        weight[17, 2] = bits
        assert side.pack(weight if name != "f32" else weight.view(np.float32), name)[1] == 18


def test_attention_names_the_row_whose_scores_overflow(side):
    step = Step.of([(0, 5)], 1, 16, np.random.default_rng(3))
    q = np.ones((5, 16), np.float32)
    q[3] = 3e38
    assert side.attention(step, q, 0, 0.0, 1e30)[1] == 4


def test_what_is_out_of_range_is_refused(side):
    ids = np.array([0, 5], np.int32)
    assert side.embed(np.zeros((5, 3), np.float32), "f32", ids, 1.0)[1] == -2
    rows = np.zeros(7, np.float32)
    assert side.penalise(rows, np.array([7], np.int32), rows[:1].copy(), rows[:1].copy())[1] == -2
    step = Step.of([(200, 3)], 1, 16, np.random.default_rng(3))
    q = np.ones((3, 16), np.float32)
    step.block_tables[0, 0] = -1  # seen without a window, unseen with one of 60
    assert side.attention(step, q, 0, 0.0, 1.0)[1] == -2
    assert side.attention(step, q, 60, 0.0, 1.0)[1] == 0
    step.block_tables[0, 1] = 2
    assert side.attention(step, q, 60, 0.0, 1.0)[1] == -2


def test_masked_positions_take_no_part_even_as_garbage(side):
    """What lies beyond a row's position or before its window may be anything, NaN included."""
    clean = Step.of([(130, 2)], 1, 16, np.random.default_rng(4))
    q = np.random.default_rng(5).standard_normal((2, 32)).astype(np.float32)
    expected = side.attention(clean, q, 40, 0.0, 0.25)
    first, second = clean.block_tables[0]
    for array in (clean.keys[first, 0].T, clean.values[first, 0]):
        array[: 130 - 39] = np.nan
    for array in (clean.keys[second, 0].T, clean.values[second, 0]):
        array[4:] = np.inf
    assert_same(side.attention(clean, q, 40, 0.0, 0.25), expected)


# --- threads ---------------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_starts_threads_of_its_own(library):
    side = Native(library, "", 3)
    x = np.random.default_rng(0).standard_normal((64, 4096)).astype(np.float32)
    with side.functions():
        expected = x + x
        child = os.fork()
        if child == 0:
            out = np.zeros_like(x)
            library.kernels["add"](x.ctypes.data, x.ctypes.data, *x.shape, out.ctypes.data)
            os._exit(0 if np.array_equal(out, expected) else 1)
        assert os.waitpid(child, 0)[1] == 0
