"""Kernels of loss, parameter gradients and update give the scalar reference's bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanes.cpu_calls import FORMATS, as_format, shifted
from lanes.update_sides import Side, assert_same_run
from mens_core.ops import StoredTensor
from mens_core.training_ops import AdamW, DropoutKey
from mens_cpu_ref.arrays import Rows
from oracle.ggml_blocks import COLUMNS, random_blocks
from oracle.ggml_blocks import FORMATS as QUANTISED

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
seeds = st.integers(0, 2**32 - 1)
threads = st.integers(1, 4)
offsets = st.integers(0, 7)
examples = st.lists(
    st.one_of(st.integers(0, 9), st.sampled_from([127, 128, 129, 200, 257])), min_size=1, max_size=5
)


@pytest.fixture
def same(library, isa):
    """Runs a call on the reference and on this instruction set's kernels, and compares."""

    def check(threads, run):
        assert_same_run(Side(library, isa, threads)(run), Side(library, None)(run))

    return check


def spread(rng, *shape, binades=12):
    """Numbers of very different sizes, so that the order of a sum matters."""
    return np.ldexp(rng.standard_normal(shape), rng.integers(-binades, 3, shape)).astype(np.float32)


def rows(rng, *shape, offset=0, binades=12):
    return Rows(shifted(spread(rng, *shape, binades=binades), offset))


def starts_of(lengths):
    return np.cumsum([0, *lengths]).astype(np.int32)


def float_weight(name, values):
    return StoredTensor(
        "w", name, values.shape, memoryview(as_format(values, name).reshape(-1).view(np.uint8))
    )


def quantised_weight(name, outputs, columns, rng, scales="ordinary", codes="any"):
    blocks = random_blocks(name, outputs * columns // COLUMNS[name], rng, scales, codes)
    return StoredTensor("w", name, (outputs, columns), memoryview(blocks.reshape(-1)))


# --- products ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
@few
@given(
    seed=seeds,
    threads=threads,
    offset=offsets,
    count=st.one_of(st.integers(1, 20), st.sampled_from([95, 130, 515])),
    outputs=st.one_of(st.integers(1, 140), st.sampled_from([128, 256, 300])),
    inputs=st.one_of(st.integers(1, 70), st.sampled_from([128, 200])),
)
def test_linear_backward_with_float_weights(same, name, seed, threads, offset, count, outputs, inputs):
    rng = np.random.default_rng(seed)
    weight = float_weight(name, spread(rng, outputs, inputs, binades=6))
    dy = rows(rng, count, outputs, offset=offset)
    same(threads, lambda ops: ops.linear_backward(dy, ops.load_matrix(weight), name="dx"))


@pytest.mark.parametrize("name", QUANTISED)
@few
@given(
    seed=seeds,
    threads=threads,
    count=st.one_of(st.integers(1, 20), st.sampled_from([97])),
    outputs=st.one_of(st.integers(1, 40), st.sampled_from([128, 131, 257])),
    blocks=st.integers(1, 7),
    scales=st.sampled_from(["ordinary", "subnormal", "largest", "zero"]),
    codes=st.sampled_from(["any", "any", "lowest", "highest"]),
)
def test_linear_backward_with_quantised_weights(
    same, name, seed, threads, count, outputs, blocks, scales, codes
):
    rng = np.random.default_rng(seed)
    columns = COLUMNS[name] * (blocks if COLUMNS[name] == 32 else 1 + blocks % 2)
    weight = quantised_weight(name, outputs, columns, rng, scales, codes)
    dy = rows(rng, count, outputs)
    same(threads, lambda ops: ops.linear_backward(dy, ops.load_matrix(weight), name="dx"))


@pytest.mark.parametrize("name", ["f32", "q4_k"])
def test_a_row_of_dx_does_not_depend_on_its_company(library, isa, name):
    rng = np.random.default_rng(5)
    weight = (
        quantised_weight(name, 150, 256, rng) if name == "q4_k" else float_weight(name, spread(rng, 150, 90))
    )
    dy = spread(rng, 700, 150)

    def run(part):
        return lambda ops: ops.linear_backward(Rows(part), ops.load_matrix(weight), name="dx")

    (together,), *_ = Side(library, isa, 2)(run(dy))
    for size in (1, 2, 5, 6, 7, 96, 97, 511, 513):
        (alone,), *_ = Side(library, isa, 1)(run(dy[-size:].copy()))
        assert alone.tobytes() == together[-size:].tobytes(), size


@few
@given(
    seed=seeds,
    threads=threads,
    offset=offsets,
    lengths=examples,
    a_width=st.one_of(st.integers(1, 20), st.sampled_from([48, 49, 70, 600])),
    b_width=st.one_of(st.integers(1, 20), st.sampled_from([64, 65, 100, 530])),
)
def test_example_products(same, seed, threads, offset, lengths, a_width, b_width):
    rng = np.random.default_rng(seed)
    a, b = rows(rng, sum(lengths), a_width, offset=offset), rows(rng, sum(lengths), b_width)
    same(threads, lambda ops: ops.example_products(a, b, starts_of(lengths), name="dw"))


@few
@given(seed=seeds, threads=threads, lengths=examples, table=st.integers(1, 30), width=st.integers(1, 70))
def test_embed_backward(same, seed, threads, lengths, table, width):
    rng = np.random.default_rng(seed)
    dy, ids = rows(rng, sum(lengths), width), rng.integers(0, table, sum(lengths)).astype(np.int32)
    same(threads, lambda ops: ops.embed_backward(dy, ids, starts_of(lengths), table, name="de"))


# --- loss ------------------------------------------------------------------------------------------


@few
@given(
    seed=seeds,
    threads=threads,
    count=st.integers(1, 6),
    width=st.one_of(st.integers(1, 300), st.sampled_from([1024, 1025, 2100])),
    size=st.sampled_from([0.01, 1, 4, 40]),
)
def test_cross_entropy(same, seed, threads, count, width, size):
    rng = np.random.default_rng(seed)
    logits = (size * rng.standard_normal((count, width))).astype(np.float32)
    logits[rng.random(logits.shape) < 0.05] = -0.0
    targets = rng.integers(0, width, count).astype(np.int32)
    same(threads, lambda ops: ops.cross_entropy(Rows(logits), targets, name="loss"))


@few
@given(seed=seeds, threads=threads, lengths=examples)
def test_example_sums(same, seed, threads, lengths):
    rng = np.random.default_rng(seed)
    kept = [np.flatnonzero(rng.random(n + 300) < rng.choice([0.02, 0.5])) for n in lengths]
    positions = np.concatenate(kept).astype(np.int32)
    losses = Rows(spread(rng, len(positions)))
    same(threads, lambda ops: ops.example_sums(losses, positions, starts_of([len(k) for k in kept])))


# --- adapters and update -------------------------------------------------------------------------------


@few
@given(
    seed=seeds,
    threads=threads,
    offset=offsets,
    count=st.integers(1, 9),
    width=st.integers(1, 2100),
    factor=st.sampled_from([2.0, 0.1, 1e-30, 2.0**-120]),
)
def test_scale_and_add_scaled(same, seed, threads, offset, count, width, factor):
    rng = np.random.default_rng(seed)
    x, y = rows(rng, count, width, offset=offset), rows(rng, count, width)
    factor = float(np.float32(factor))
    same(threads, lambda ops: ops.scale(x, factor, name="scaled"))
    same(threads, lambda ops: ops.add_scaled(y, x, factor, name="added"))


@few
@given(
    seed=seeds,
    threads=threads,
    count=st.integers(1, 9),
    width=st.integers(1, 300),
    rate=st.sampled_from([0.0, 0.1, 0.5, 0.999, 2.0**-33]),
    key=st.builds(
        DropoutKey,
        seed=st.integers(0, 2**64 - 1),
        step=st.integers(0, 2**32 - 1),
        layer=st.integers(0, 2**16 - 1),
    ),
)
def test_dropout(same, seed, threads, count, width, rate, key):
    rng = np.random.default_rng(seed)
    x = rows(rng, count, width)
    positions = rng.integers(0, 2**31 - 1, count).astype(np.int32)
    of_step = rng.integers(0, 2**16, count).astype(np.int32)
    same(threads, lambda ops: ops.dropout(x, rate, key, positions, of_step, name="dropped"))


@few
@given(seed=seeds, width=st.one_of(st.integers(1, 3000), st.sampled_from([128, 1024, 1025])))
def test_sum_of_squares(same, seed, width):
    rng = np.random.default_rng(seed)
    x = rows(rng, 1, width)
    same(1, lambda ops: ops.sum_of_squares(x, name="squares"))


STEP = AdamW(*(float(np.float32(x)) for x in (3e-4, 0.9, 0.1, 0.999, 1e-3, 1e-8, 1 - 3e-6, 0.1, 1e-3)))


@few
@given(seed=seeds, threads=threads, offset=offsets, count=st.integers(1, 5), width=st.integers(1, 1500))
def test_adamw(same, seed, threads, offset, count, width):
    rng = np.random.default_rng(seed)
    tensors = [spread(rng, count, width, binades=40) for _ in range(3)] + [np.abs(spread(rng, count, width))]
    tensors[1][0, 0] = 0

    def run(ops):
        parameter, gradient, m, v = (Rows(shifted(x, offset)) for x in tensors)
        for _ in range(2):
            ops.adamw(parameter, gradient, m, v, STEP, name="w")
        return parameter, m, v

    same(threads, run)
