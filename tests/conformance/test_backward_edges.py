"""Faults, ranges and masks of the backward operators: reference and kernels alike, and the lane over them."""

from __future__ import annotations

import numpy as np
import pytest

from lanes.backward_calls import BackwardNative, filled, gradients
from lanes.cpu_calls import Step, address, assert_same
from mens_core.ops import AttentionSpec, Batch, Fault, StoredTensor
from mens_core.training_ops import AttentionSaved
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.backward_library import BACKWARD_OPERATORS
from mens_cpu_ref.backward_ops import BackwardOps

GATES = ["silu_gate_backward", "gelu_gate_backward"]


@pytest.fixture(params=["reference", "kernels"])
def side(request, library, isa) -> BackwardNative:
    return BackwardNative(library, None if request.param == "reference" else isa, 2)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.parametrize("row", [0, 2])
@pytest.mark.parametrize("column", [0, 16, 37])
def test_the_first_row_that_is_not_finite_is_named(side, bad, row, column):
    dy, x, up = (normal(seed, 4, 38) for seed in range(3))
    dy[row, column] = dy[3, 5] = bad
    assert side.norm_backward(dy, x, up[0].copy(), 1, 1e-6)[1] == 1 + row
    assert side.norm_backward(dy, x, up[0, :19].copy(), 2, 1e-6)[1] == 1 + row
    for name in GATES:
        assert side.gate_backward(name, dy, x, up)[1] == 1 + row
    assert side.softcap_backward(dy, x, 30.0)[1] == 1 + row
    table = np.ones((1, 128, 2, 19), np.float32)
    positions = np.arange(4, dtype=np.int32)
    assert side.rope_backward(dy, 1, table, np.zeros(1, np.int32), positions)[1] == 1 + row


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("column", [5, 39])  # in the middle of the array, and among its last elements
def test_either_gradient_of_a_gate_makes_the_fault(side, name, column):
    dy, gate, up = (np.ones((3, 40), np.float32) for _ in range(3))
    up[2, column] = 3e38
    dy[2, column] = 4  # dgate overflows, dup does not
    (dgate, dup), code = side.gate_backward(name, dy, gate, up)
    assert (code, np.isfinite(dgate).all(), np.isfinite(dup).all()) == (3, False, True)
    up[2, column], gate[2, column] = 0, 3e38  # the other way round
    (dgate, dup), code = side.gate_backward(name, dy, gate, up)
    assert (code, np.isfinite(dgate).all(), np.isfinite(dup).all()) == (3, True, False)


def test_an_overflowing_sum_of_squares_is_no_zero_gradient(side):
    x = np.full((2, 40), 1e-3, np.float32)
    x[1] = 1e30
    dx, code = side.norm_backward(np.ones_like(x), x, np.ones(40, np.float32), 1, 1e-6)
    assert code == 2
    assert np.isfinite(dx[0]).all()
    assert np.isnan(dx[1]).all()


@pytest.mark.parametrize("gate", [3e38, -3e38, 1.0e20, -1.0e20, 88.0, -88.0, -87.5, 0.0, -0.0])
def test_the_derivative_of_an_activation_is_one_or_zero_far_out(side, gate):
    """Where x * x overflows too."""
    one = np.ones((1, 1), np.float32)
    for name in GATES:
        (slope, _), code = side.gate_backward(name, one, np.full((1, 1), gate, np.float32), one)
        assert code == 0
        expected = 0.5 if gate == 0 else float(gate > 0)
        assert abs(slope[0, 0] - expected) < 1e-35


# --- attention -----------------------------------------------------------------------------------


def attention_case(lengths, window=0, seed=3):
    step = filled(Step.of([(0, n) for n in lengths], 2, 24, np.random.default_rng(seed)))
    q, dy = normal(seed + 1, sum(lengths), 4 * 24), normal(seed + 2, sum(lengths), 4 * 24)
    return step, q, dy, (window, 0.0, 0.25)


def test_attention_names_the_row_of_either_gradient(side):
    step, q, dy, constants = attention_case([5, 7])
    saved, _ = side.attention_saving(step, q, *constants)
    broken = dy.copy()
    broken[8, 30] = np.inf  # of row 8, which sees rows 5 to 8: their dv is infinite
    made, code = side.attention_backward(step, broken, q, saved, *constants)
    assert code == 6
    dq, dk, dv = gradients(step, q, made)
    assert np.flatnonzero(~np.isfinite(dq).all(axis=1)).tolist() == [8]
    assert np.flatnonzero(~np.isfinite(dv).all(axis=1)).tolist() == [5, 6, 7, 8]
    assert np.isfinite(dk[:5]).all()


@pytest.mark.parametrize("window", [0, 40])
def test_what_lies_beyond_a_sequence_takes_no_part(side, window):
    step, q, dy, constants = attention_case([150, 3], window)
    saved, _ = side.attention_saving(step, q, *constants)
    expected = side.attention_backward(step, dy, q, saved, *constants)
    assert expected[1] == 0
    last, other = step.block_tables[0, 1], step.block_tables[1, 0]
    step.keys[last, :, :, 22:] = np.nan
    step.values[last, :, 22:] = np.inf
    step.keys[other, :, :, 3:] = np.inf
    step.values[other, :, 3:] = np.nan
    assert_same(side.attention_backward(step, dy, q, saved, *constants), expected)


def test_a_key_that_left_the_window_has_no_part_in_later_queries(side):
    step, q, dy, constants = attention_case([300], 40)
    saved, _ = side.attention_saving(step, q, *constants)
    whole = gradients(step, q, side.attention_backward(step, dy, q, saved, *constants)[0])
    changed = dy.copy()
    changed[240:] *= 3
    later = gradients(step, q, side.attention_backward(step, changed, q, saved, *constants)[0])
    for before, after in zip(whole[1:], later[1:], strict=True):
        # Position 200 is seen up to position 239.
        assert_same(after[:201].copy(), before[:201].copy())
        assert (after[201:] != before[201:]).any(axis=1).all()


def test_sequences_that_are_not_whole_are_refused(side):
    step, q, dy, constants = attention_case([130, 3])
    saved, _ = side.attention_saving(step, q, *constants)

    def code():
        return side.attention_backward(step, dy, q, saved, *constants)[1]

    assert code() == 0
    step.positions[130:] += 1
    assert code() == -2
    step.positions[130:] -= 1
    for block in (-1, len(step.keys)):
        kept = step.block_tables[0, 1]
        step.block_tables[0, 1] = block
        assert code() == -2
        step.block_tables[0, 1] = kept
    step.starts[2] = 132
    assert code() == -2


def test_a_step_without_rows_is_no_error(side):
    step, q, _, _ = attention_case([3])
    step.starts[1] = 0
    empty = Step(
        step.positions[:0], step.starts, step.block_tables, step.k[:0], step.v[:0], step.keys, step.values
    )
    none = q[:0].copy()
    with side.functions() as f:
        code = f["attention_backward"](
            *[address(none)] * 5, 0, 4, 2, 24, address(empty.positions), address(empty.starts),
            address(empty.block_tables), *empty.block_tables.shape, len(empty.keys), address(empty.keys),
            address(empty.values), 0.25, 0, 0.0, *[address(none)] * 3,
        )  # fmt: skip
    assert code == 0


def test_rope_refuses_a_position_whose_block_is_not_made(side):
    table, slots = np.ones((1, 128, 2, 4), np.float32), np.array([0, -1], np.int32)
    for position in (-1, 128, 256):
        positions = np.array([position], np.int32)
        assert side.rope_backward(np.ones((1, 8), np.float32), 1, table, slots, positions)[1] == -2


# --- the lane ------------------------------------------------------------------------------------


@pytest.fixture
def ops(library):
    return BackwardOps({**library.kernels, **library.bind("vox_", BACKWARD_OPERATORS)})


def stored(values):
    return StoredTensor("w", "f32", values.shape, memoryview(values.tobytes()))


def test_the_lane_passes_its_tensors_as_they_are(ops, library):
    reference = BackwardNative(library, None)
    dy, x, up = (Rows(normal(seed, 5, 80)) for seed in range(3))
    weight = ops.load_vector(stored(normal(4, 40)))
    found = ops.head_norm_backward(dy, x, weight, 2, 1e-6, name="norm")
    assert_same(found.values, reference.norm_backward(dy.values, x.values, weight.values, 2, 1e-6)[0])
    for name in GATES:
        both = getattr(ops, name)(dy, x, up, name="gate")
        expected, _ = reference.gate_backward(name, dy.values, x.values, up.values)
        for mine, theirs in zip(both, expected, strict=True):
            assert_same(mine.values, theirs)
    found = ops.softcap_backward(dy, x, 3.0, name="cap")
    assert_same(found.values, reference.softcap_backward(dy.values, x.values, 3.0)[0])
    table = ops.rotary_table([(1 << 128) // (7 + 3 * i) for i in range(20)], None)
    positions = np.array([0, 300, 5, 1, 2], np.int32)
    backward = ops.rope_backward(dy, 2, table, positions, name="rope")  # makes the blocks it needs
    forward = ops.rope(backward, 2, table, positions, name="rope")
    assert np.abs(forward.values - dy.values).max() < 1e-5
    assert ops.take_faults() == []


def test_attention_through_the_lane_is_the_native_call(ops, library):
    reference = BackwardNative(library, None)
    step, q, dy, _ = attention_case([20, 131])
    constants = (100, 7.0, 0.25)
    cache = ops.new_kv_cache(layers=2, kv_heads=2, head_dim=24, blocks=len(step.keys))
    batch = Batch(
        token_ids=np.zeros(151, np.int32),
        positions=step.positions,
        starts=step.starts,
        block_tables=step.block_tables,
        logit_rows=np.zeros(0, np.int32),
    )
    ops.kv_append(cache, 1, Rows(step.k), Rows(step.v), batch)
    spec = AttentionSpec(heads=4, kv_heads=2, head_dim=24, scale=0.25, window=100, softcap=7.0)
    saved = ops.attention_saving(Rows(q), cache, 1, batch, spec, name="attention")
    expected, _ = reference.attention_saving(step, q, *constants)
    for mine, theirs in zip((saved.out, saved.m, saved.l), expected, strict=True):
        assert_same(mine.values, theirs)
    made = ops.attention_backward(Rows(dy), Rows(q), saved, cache, 1, batch, spec, name="attention")
    wanted = gradients(step, q, reference.attention_backward(step, dy, q, expected, *constants)[0])
    for mine, theirs in zip(made, wanted, strict=True):
        assert_same(mine.values, theirs)

    broken = dy.copy()
    broken[22, 0] = np.nan
    ops.attention_backward(Rows(broken), Rows(q), saved, cache, 1, batch, spec, name="layers.1.attention")
    assert ops.take_faults() == [Fault("layers.1.attention", (20, 21, 22))]

    later = Batch(batch.token_ids, batch.positions + 1, batch.starts, batch.block_tables, batch.logit_rows)
    with pytest.raises(ValueError, match="sequence 0 are not its positions from 0 on"):
        ops.attention_backward(Rows(dy), Rows(q), saved, cache, 1, later, spec, name="attention")
    short = AttentionSaved(saved.out, Rows(saved.m.values[:, :2].copy()), saved.l)
    with pytest.raises(ValueError, match=r"m \[151, 2\], l \[151, 4\] differ"):
        ops.attention_backward(Rows(dy), Rows(q), short, cache, 1, batch, spec, name="attention")


def test_operands_that_do_not_fit_are_errors_not_reads_past_the_end(ops):
    a, b = Rows(normal(0, 3, 8)), Rows(normal(1, 3, 6))
    weight = ops.load_vector(stored(normal(2, 8)))
    table = ops.rotary_table([1 << 120] * 4, None)
    for call in (
        lambda: ops.rms_norm_backward(b, a, weight, 1e-6, name="n"),
        lambda: ops.head_norm_backward(a, a, weight, 2, 1e-6, name="n"),
        lambda: ops.rope_backward(b, 1, table, np.arange(3, dtype=np.int32), name="n"),
        lambda: ops.rope_backward(a, 1, table, np.arange(2, dtype=np.int32), name="n"),
        lambda: ops.silu_gate_backward(a, a, b, name="n"),
        lambda: ops.gelu_gate_backward(a, b, a, name="n"),
        lambda: ops.softcap_backward(b, a, 3.0, name="n"),
    ):
        with pytest.raises(ValueError, match=r"^n: "):
            call()


def test_a_worker_that_only_serves_binds_no_backward(library):
    assert not set(library.kernels) & set(BACKWARD_OPERATORS)
