"""Backward kernels of the CPU lane give the scalar reference's bytes: any shape, alignment, threads."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanes.backward_calls import BackwardNative, filled, gradients
from lanes.cpu_calls import Step, assert_same, domain, shifted

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
seeds = st.integers(0, 2**32 - 1)
threads = st.integers(1, 4)
offsets = st.integers(0, 7)


@pytest.fixture(scope="session")
def reference(library):
    return BackwardNative(library, None)


@pytest.fixture(scope="session")
def kernels(library, isa):
    return lambda threads: BackwardNative(library, isa, threads)


def spread(rng, *shape, binades=12):
    """Numbers of very different sizes, so that the order of a sum matters."""
    return np.ldexp(rng.standard_normal(shape), rng.integers(-binades, 3, shape)).astype(np.float32)


@few
@given(
    seed=seeds,
    threads=threads,
    offset=offsets,
    rows=st.integers(1, 30),
    heads=st.integers(1, 5),
    width=st.one_of(st.integers(1, 300), st.sampled_from([640, 1152, 2049])),
)
def test_norms_have_the_references_bits(reference, kernels, seed, threads, offset, rows, heads, width):
    rng = np.random.default_rng(seed)
    x = shifted(spread(rng, rows, heads * width), offset)
    dy, weight = spread(rng, rows, heads * width), spread(rng, width)
    assert_same(
        kernels(threads).norm_backward(dy, x, weight, heads, 1e-6),
        reference.norm_backward(dy, x, weight, heads, 1e-6),
    )


@few
@given(
    seed=seeds, threads=threads, rows=st.integers(1, 40), heads=st.integers(1, 4), pairs=st.integers(1, 70)
)
def test_rope_has_the_references_bits(reference, kernels, seed, threads, rows, heads, pairs):
    rng = np.random.default_rng(seed)
    table = spread(rng, 3, 128, 2, pairs, binades=4)
    slots = np.array([2, -1, 0, 1], np.int32)
    positions = rng.choice(np.r_[0:128, 256:512], rows).astype(np.int32)
    dy = spread(rng, rows, heads * 2 * pairs)
    found = kernels(threads).rope_backward(dy, heads, table, slots, positions)
    assert_same(found, reference.rope_backward(dy, heads, table, slots, positions))
    # The definition in other words: `rope` by the negative angles.
    table[:, :, 1] *= -1
    assert_same(found, reference.rope(dy, heads, table, slots, positions))


@pytest.mark.parametrize("operator", ["silu_gate_backward", "gelu_gate_backward"])
@few
@given(seed=seeds, threads=threads, offset=offsets, rows=st.integers(1, 9), width=st.integers(1, 2100))
def test_gates_have_the_references_bits(reference, kernels, operator, seed, threads, offset, rows, width):
    rng = np.random.default_rng(seed)
    gate = shifted(8 * spread(rng, rows, width), offset)
    dy, up = spread(rng, rows, width), spread(rng, rows, width)
    assert_same(
        kernels(threads).gate_backward(operator, dy, gate, up),
        reference.gate_backward(operator, dy, gate, up),
    )


@pytest.mark.parametrize("operator", ["silu_gate_backward", "gelu_gate_backward"])
def test_gates_have_the_references_bits_all_over_their_domain(reference, kernels, operator):
    gate = domain("silu", np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)).reshape(1, -1)
    ones = np.ones_like(gate)
    found = kernels(2).gate_backward(operator, ones, gate, ones)
    assert found[1] == 0
    assert_same(found, reference.gate_backward(operator, ones, gate, ones))


@few
@given(seed=seeds, threads=threads, width=st.integers(1, 3000), cap=st.sampled_from([30.0, 50.0, 0.7]))
def test_softcap_has_the_references_bits(reference, kernels, seed, threads, width, cap):
    rng = np.random.default_rng(seed)
    x, dy = 100 * spread(rng, 2, width), spread(rng, 2, width)
    assert_same(kernels(threads).softcap_backward(dy, x, cap), reference.softcap_backward(dy, x, cap))


def test_softcap_has_the_references_bits_all_over_its_domain(reference, kernels):
    x = domain("tanh", np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)).reshape(1, -1)
    ones = np.ones_like(x)
    assert_same(kernels(2).softcap_backward(ones, x, 1.0), reference.softcap_backward(ones, x, 1.0))


def whole_sequences(lengths, kv_heads, head_dim, rng) -> Step:
    return filled(Step.of([(0, length) for length in lengths], kv_heads, head_dim, rng))


def check_attention(side, reference, step, query_heads, window, softcap, rng):
    head_dim = step.keys.shape[2]
    q, dy = (
        rng.standard_normal((len(step.positions), query_heads * head_dim)).astype(np.float32)
        for _ in range(2)
    )
    constants = (window, softcap, float(np.float32(head_dim**-0.5)))
    saved, code = side.attention_saving(step, q, *constants)
    expected, expected_code = reference.attention_saving(step, q, *constants)
    assert code == expected_code == 0
    for found, wanted in zip(saved, expected, strict=True):
        assert_same(found, wanted)
    assert_same(saved[0], reference.attention(step, q, *constants)[0])
    assert_same(
        side.attention_backward(step, dy, q, saved, *constants),
        reference.attention_backward(step, dy, q, expected, *constants),
    )


@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 136, 256])
@settings(few, max_examples=8)
@given(
    seed=seeds,
    threads=threads,
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (7, 7), (16, 2)]),
    lengths=st.lists(st.one_of(st.integers(1, 40), st.sampled_from([127, 128, 129])), min_size=1, max_size=4),
    window=st.sampled_from([0, 0, 1, 3, 70, 128, 129, 200]),
    softcap=st.sampled_from([0.0, 0.0, 20.0]),
)
def test_attention_has_the_references_bits(
    reference, kernels, head_dim, seed, threads, heads, lengths, window, softcap
):
    rng = np.random.default_rng(seed)
    step = whole_sequences(lengths, heads[1], head_dim, rng)
    check_attention(kernels(threads), reference, step, heads[0], window, softcap, rng)


@pytest.mark.parametrize("window", [0, 1, 70, 129, 200, 256])
def test_long_sequences_have_the_references_bits(reference, kernels, window):
    rng = np.random.default_rng(3)
    step = whole_sequences([389, 0, 260, 5], 1, 24, rng)
    check_attention(kernels(3), reference, step, 3, window, 0.0, rng)


def test_many_streams_go_through_in_passes(reference, kernels):
    """480 streams of a quarter of a megabyte: a pass takes 64 MiB."""
    rng = np.random.default_rng(5)
    step = whole_sequences([9] * 60, 8, 64, rng)
    check_attention(kernels(2), reference, step, 8, 0, 0.0, rng)


def test_a_sequence_does_not_depend_on_its_company(kernels):
    rng = np.random.default_rng(4)
    step = whole_sequences([150, 33], 2, 16, rng)
    q, dy = (rng.standard_normal((183, 64)).astype(np.float32) for _ in range(2))
    saved, _ = kernels(1).attention_saving(step, q, 0, 0.0, 0.25)
    made, _ = kernels(3).attention_backward(step, dy, q, saved, 0, 0.0, 0.25)
    alone = Step(
        positions=step.positions[150:].copy(),
        starts=np.array([0, 33], np.int32),
        block_tables=step.block_tables[1:].copy(),
        k=step.k[150:].copy(),
        v=step.v[150:].copy(),
        keys=step.keys,
        values=step.values,
    )
    part = tuple(t[150:].copy() for t in saved)
    single, _ = kernels(1).attention_backward(alone, dy[150:].copy(), q[150:].copy(), part, 0, 0.0, 0.25)
    for together, by_itself in zip(gradients(step, q, made), gradients(alone, q[150:], single), strict=True):
        assert_same(together[150:].copy(), by_itself)
