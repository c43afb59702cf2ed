"""Refusals and faults of loss, parameter gradients, adapters and update; what is written where."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from lanes.update_sides import Side
from mens_core.dropout_rate import DropoutRate
from mens_core.ops import Fault, StoredTensor
from mens_core.philox import STREAM_DROPOUT, philox
from mens_core.training_ops import AdamW, DropoutKey
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.training_lane import CpuTrainingOps, ReferenceTrainingOps
from mens_cpu_ref.update_library import UPDATE_OPERATORS
from oracle.ggml_blocks import random_blocks

PLAIN = AdamW(*(float(np.float32(x)) for x in (1e-3, 0.9, 0.1, 0.999, 1e-3, 1e-8, 1, 0.1, 1e-3)))


@pytest.fixture(params=["kernels", "reference"])
def ops(library, request):
    return CpuTrainingOps(library) if request.param == "kernels" else ReferenceTrainingOps()


def ones(*shape):
    return Rows(np.ones(shape, np.float32))


def index(*values):
    return np.array(values, np.int32)


def q4_k(outputs, columns):
    blocks = random_blocks("q4_k", outputs * columns // 256, np.random.default_rng(1))
    return StoredTensor("w", "q4_k", (outputs, columns), memoryview(blocks.reshape(-1)))


# --- faults ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_what_is_not_finite_names_its_row_or_example(ops, bad):
    x = ones(140, 256)
    x.values[131, 7] = bad
    starts = index(0, 130, 140)
    ops.linear_backward(x, ops.load_matrix(q4_k(256, 256)), name="dx")
    ops.linear_backward(x, ops.matrix(ones(256, 3), name="w"), name="dx.float")
    ops.example_products(x, ones(140, 3), starts, name="narrow")
    ops.example_products(ones(140, 3), x, starts, name="wide")
    ops.embed_backward(x, np.zeros(140, np.int32), starts, 2, name="table")
    ops.scale(x, 0.5, name="scaled")
    ops.add_scaled(ones(140, 256), x, 0.5, name="added")
    ops.dropout(x, 0.0, DropoutKey(0, 0, 0), np.arange(140), np.zeros(140, np.int32), name="dropped")
    ops.sum_of_squares(x, name="squares")
    ops.example_sums(Rows(x.values[:, 7].copy()), np.arange(140), starts)
    assert ops.take_faults() == [
        Fault("dx", (131,)), Fault("dx.float", (131,)), Fault("narrow", (1,)), Fault("wide", (1,)),
        Fault("table", (1,)), Fault("scaled", (131,)), Fault("added", (131,)), Fault("dropped", (131,)),
        Fault("squares", (0,)), Fault("example_sums", (1,)),
    ]  # fmt: skip


def test_a_loss_that_is_not_finite_names_its_row(ops):
    logits = np.zeros((4, 300), np.float32)
    logits[1, 299], logits[3, 0] = np.nan, np.inf
    losses, _ = ops.cross_entropy(Rows(logits), index(0, 0, 0, 5), name="loss")
    assert ops.take_faults() == [Fault("loss", (1, 3))]
    assert np.isfinite(losses.values).tolist() == [True, False, True, False]


@pytest.mark.parametrize("which", ["parameter", "m", "v"])
def test_adamw_names_the_row_of_anything_that_is_not_finite(ops, which):
    tensors = {name: ones(5, 40) for name in ("parameter", "m", "v")}
    tensors[which].values[3, 1] = np.inf
    ops.adamw(tensors["parameter"], ones(5, 40), tensors["m"], tensors["v"], PLAIN, name="w")
    rows = {row for fault in ops.take_faults() for row in fault.rows}
    assert rows == {3}


def test_a_matrix_that_is_not_finite_is_a_fault_of_its_row(ops):
    x = ones(20, 5)
    x.values[17, 2] = np.nan
    ops.matrix(x, name="A")
    assert ops.take_faults() == [Fault("A", (17,))]


# --- refusals --------------------------------------------------------------------------------------


def products(a, b, *starts):
    return lambda ops: ops.example_products(a, b, index(*starts), name="dw")


def table(*ids):
    return lambda ops: ops.embed_backward(ones(len(ids), 3), index(*ids), index(0, len(ids)), 7, name="de")


def spread(count, *rows):
    return lambda ops: ops.put_rows(ones(2, 3), index(*rows), count)


def losses(targets):
    return lambda ops: ops.cross_entropy(ones(2, 3), index(*targets), name="loss")


def sums(*positions):
    return lambda ops: ops.example_sums(ones(3), index(*positions), index(0, 3))


def dropped(width, rate=0.5, position=0, example=0):
    key = DropoutKey(0, 0, 0)
    return lambda ops: ops.dropout(ones(1, width), rate, key, index(position), index(example), name="d")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda ops: ops.linear_backward(ones(2, 4), ops.matrix(ones(5, 3), name="w"), name="dx"),
            ValueError,
            r"dx: dy \[2, 4\] does not fit \[5, 3\]",
        ),
        (lambda ops: ops.matrix(ones(4), name="A"), ValueError, r"A: \[4\] is not a matrix"),
        (spread(5, 1, 1), ValueError, "ascending"),
        (spread(5, -1, 1), ValueError, "ascending"),
        (spread(2, 1, 2), ValueError, "ascending"),
        (spread(5, 1), ValueError, "ascending"),
        (products(ones(3, 2), ones(4, 2), 0, 3), ValueError, "no product"),
        (products(ones(3, 2), ones(3, 2), 0, 2), ValueError, "divide 3 rows"),
        (products(ones(3, 2), ones(3, 2), 0, 3, 2, 3), ValueError, "divide 3 rows"),
        (table(0, 7), IndexError, "de: "),
        (table(0, -1), IndexError, "de: "),
        (losses([0, 3]), IndexError, "loss: "),
        (losses([0]), ValueError, "2 rows of logits"),
        (sums(0, 2, 2), IndexError, "example_sums: "),
        (sums(-1, 2, 3), IndexError, "example_sums: "),
        (sums(0, 2), ValueError, "at 2 positions"),
        (lambda ops: ops.add_scaled(ones(2, 3), ones(3, 2), 1.0, name="y"), ValueError, "differ"),
        (dropped(4, rate=1.0), ValueError, r"\[0, 1\)"),
        (dropped(4, position=-1), IndexError, "d: "),
        (dropped(4, example=1 << 16), IndexError, "d: "),
        (dropped((1 << 18) + 1), IndexError, "d: "),
        (
            lambda ops: ops.adamw(ones(2, 3), ones(3, 2), ones(2, 3), ones(2, 3), PLAIN, name="w"),
            ValueError,
            "shapes",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ops, call, error, message):
    with pytest.raises(error, match=message):
        call(ops)


@pytest.mark.parametrize("key", [(1 << 64, 0, 0), (0, 1 << 32, 0), (0, 0, 1 << 16), (-1, 0, 0)])
def test_a_key_that_native_words_would_cut_is_refused(key):
    with pytest.raises(ValueError, match="64, 32 and 16 bits"):
        DropoutKey(*key)


@pytest.mark.parametrize("rate", [-0.1, 1.0, float("nan")])
def test_a_dropout_rate_outside_its_range_is_refused(rate):
    with pytest.raises(ValueError, match="dropout rate"):
        DropoutRate.of(rate)


# --- what is written -------------------------------------------------------------------------------------


def test_a_copy_stays_as_it_was(ops):
    values = np.ones((3, 4), np.float32)
    tensor = ops.from_host(values)
    matrix = ops.matrix(tensor, name="A")
    before = ops.linear(ones(1, 4), matrix, name="y").values.copy()
    values[:], tensor.values[:] = 7, 9
    assert ops.linear(ones(1, 4), matrix, name="y").values.tobytes() == before.tobytes()
    assert (tensor.values == 9).all() and (values == 7).all()


def test_gradients_of_one_call_do_not_share_rows(ops):
    first, second = ops.example_products(ones(4, 2), ones(4, 3), index(0, 1, 4), name="dw")
    first.values[:] = -5
    assert (second.values == 3).all()
    assert ops.add(first, second, name="sum").values.tolist() == [[-2.0] * 3] * 2


def test_no_dropout_is_the_same_bytes_but_for_subnormals(ops):
    x = np.array([[1.5, -0.0, 1e-40, -1e-40, 3e38]], np.float32)
    made = ops.dropout(Rows(x), 0.0, DropoutKey(3, 1, 2), index(4), index(5), name="d").values
    assert made.tobytes() == np.array([[1.5, -0.0, 0.0, -0.0, 3e38]], np.float32).tobytes()


@pytest.mark.parametrize("column", [0, 3, 70, 130])
def test_a_word_at_the_threshold_is_kept(ops, column):
    words = philox(5, (9, 2 << 16 | column // 4, STREAM_DROPOUT | 3 << 16, 7))
    at = words[column % 4]
    for threshold, is_kept in ((at, True), (at + 1, False)):
        rate = threshold / 2**32  # exact
        assert DropoutRate.of(rate).threshold == threshold
        made = ops.dropout(ones(1, 131), rate, DropoutKey(5, 7, 3), index(9), index(2), name="d").values
        assert bool(made[0, column]) == is_kept


def test_a_lane_that_only_serves_binds_nothing_of_training():
    code = (
        "import sys; from mens_cpu_ref.lane import CpuOps; from mens_cpu_ref.library import load_library; "
        "lane = CpuOps(load_library().kernels); "
        "assert not [m for m in sys.modules if 'update' in m or 'training' in m or 'backward' in m]; "
        "assert 'adamw' not in lane._functions"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
    )


@pytest.mark.parametrize("columns", [96, 83, 33])
def test_linear_backward_writes_its_rows_and_nothing_else(library, isa, columns):
    """A part's tile is wider than the last columns are."""
    rng = np.random.default_rng(3)
    with Side(library, isa, 2)._set():
        ops = CpuTrainingOps(library)
        matrix = ops.matrix(Rows(rng.standard_normal((40, columns), dtype=np.float32)), name="w")
        dy = Rows(rng.standard_normal((7, 40), dtype=np.float32))
        memory = np.full(7 * columns + 64, 7, np.float32)
        out = memory[32:]
        function = library.bind("vox_", UPDATE_OPERATORS)["linear_backward"]
        assert function(0, matrix.address, 40, columns, dy.address, 7, out.ctypes.data) == 0
        assert (memory[:32] == 7).all() and (memory[32 + 7 * columns :] == 7).all()
        assert out[: 7 * columns].tobytes() == ops.linear_backward(dy, matrix, name="dx").values.tobytes()


def test_a_quantised_weight_is_never_dequantised_whole():
    """Its float32 rows would be 134 MB; what the call adds to the process is its scratch and its output."""
    code = """
import resource
import numpy as np
from mens_core.ops import StoredTensor
from mens_cpu_ref.arrays import Rows
from mens_cpu_ref.library import load_library
from mens_cpu_ref.training_lane import CpuTrainingOps
library = load_library()
library.set_threads(2)
ops = CpuTrainingOps(library)
blocks = np.zeros((16384 * 2048 // 32, 34), np.uint8)
blocks[:, 1] = 0x20
weight = ops.load_matrix(StoredTensor("w", "q8_0", (16384, 2048), memoryview(blocks.reshape(-1))))
dy = Rows(np.ones((8, 16384), np.float32))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ops.linear_backward(dy, weight, name="dx")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], check=True, env=environment, stdout=subprocess.PIPE)
    assert int(done.stdout) < 8 << 10  # KiB
