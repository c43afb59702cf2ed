"""Every kernel of the CPU lane gives the scalar reference's bytes: any shape, alignment, thread count."""

from __future__ import annotations

import hashlib
import os
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lanes.cpu_calls import FORMATS, FUNCTIONS, Step, as_format, assert_same, domain, shifted
from mens_core.rotary import frequencies
from vox_plugin_api.families.rope import Rope

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def spread(rng, *shape, binades=12):
    """Numbers of very different sizes, so that the order of a sum matters."""
    return np.ldexp(rng.standard_normal(shape), rng.integers(-binades, 3, shape)).astype(np.float32)


seeds = st.integers(0, 2**32 - 1)
threads = st.integers(1, 4)
offsets = st.integers(0, 7)


@pytest.mark.parametrize("name", FORMATS)
@few
@given(
    seed=seeds,
    threads=threads,
    offset=offsets,
    rows=st.one_of(st.integers(1, 20), st.sampled_from([95, 97, 130])),
    outputs=st.one_of(st.integers(1, 70), st.sampled_from([128, 200])),
    inputs=st.one_of(st.integers(1, 140), st.sampled_from([256, 511, 640, 1100])),
)
def test_linear_has_the_references_bits(
    reference, kernels, name, seed, threads, offset, rows, outputs, inputs
):
    rng = np.random.default_rng(seed)
    weight = as_format(spread(rng, outputs, inputs, binades=6), name)
    x = shifted(spread(rng, rows, inputs), offset)
    assert_same(kernels(threads).linear(x, weight, name), reference.linear(x, weight, name))


@few
@given(seed=seeds, threads=threads, rows=st.integers(1, 40), inputs=st.integers(1, 300))
def test_a_row_does_not_depend_on_its_company(kernels, seed, threads, rows, inputs):
    rng = np.random.default_rng(seed)
    weight, x = spread(rng, 33, inputs), spread(rng, rows, inputs)
    together, _ = kernels(threads).linear(x, weight, "f32")
    alone, _ = kernels(1).linear(x[-1:].copy(), weight, "f32")
    assert_same(together[-1:].copy(), alone)


@pytest.mark.parametrize("name", FORMATS)
@few
@given(seed=seeds, threads=threads, rows=st.integers(1, 40), width=st.integers(1, 200))
def test_embedding_rows_and_loaded_vectors_have_the_references_bits(
    reference, kernels, name, seed, threads, rows, width
):
    rng = np.random.default_rng(seed)
    table = as_format(spread(rng, 21, width), name)
    ids = rng.integers(0, 21, rows).astype(np.int32)
    assert_same(
        kernels(threads).embed(table, name, ids, 25.298221588134766),
        reference.embed(table, name, ids, 25.298221588134766),
    )
    for add_one in (False, True):
        assert_same(kernels(threads).widen(table, name, add_one), reference.widen(table, name, add_one))


@pytest.mark.parametrize("name", ["f16", "bf16"])
def test_every_half_is_widened_as_the_reference_does(reference, kernels, name):
    halves = np.arange(2**16, dtype=np.uint16)
    exponent = 0x7C00 if name == "f16" else 0x7F80
    finite = halves[(halves & exponent) != exponent]
    assert_same(kernels(1).widen(finite, name, False), reference.widen(finite, name, False))


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
    weight = spread(rng, width)
    assert_same(kernels(threads).norm(x, weight, heads, 1e-6), reference.norm(x, weight, heads, 1e-6))


@few
@given(
    seed=seeds, pairs=st.integers(1, 40), factor=st.integers(1 << 61, 1 << 66), first=st.integers(0, 2**30)
)
def test_rotary_tables_have_the_references_bits(reference, kernels, seed, pairs, factor, first):
    rng = np.random.default_rng(seed)
    freqs = [int.from_bytes(rng.bytes(16), "little") >> int(rng.integers(0, 40)) for _ in range(pairs)]
    assert_same(kernels(2).rotary(freqs, factor, first, 3), reference.rotary(freqs, factor, first, 3))


@pytest.mark.parametrize("octant_edge", range(8))
def test_rotary_tables_agree_on_the_axes(reference, kernels, octant_edge):
    # Position 1 times these: on an octant's edge, and one unit to each side.
    freqs = [(octant_edge * 2**125 + d) % 2**128 for d in (-1, 0, 1)]
    assert_same(kernels(1).rotary(freqs, 1 << 64, 1, 1), reference.rotary(freqs, 1 << 64, 1, 1))


@pytest.mark.parametrize(
    ("theta", "width", "digest"),
    [
        (10**4, 256, "732707313f850e1d1e22d2e3629fe1de4b6618a5bc9a4196e78ac324db3f0170"),
        (10**6, 256, "786e767cbb2e6befb62e2e3e8e09290a56ce6466262944f41a7b2d55c0ca104f"),
        (10**6, 128, "baebad2c4019398bf458c4c1f97e9fbe1011ccaa71c89d0ca3b652e1005273c8"),
    ],
)
def test_rotary_blocks_have_the_documented_digests(reference, kernels, theta, width, digest):
    freqs = list(frequencies(Rope(theta=Fraction(theta), head_dim=width)))
    for side in (kernels(2), reference):
        table = side.rotary(freqs, 1 << 64, 256, 128)
        planes = table.transpose(1, 0, 2).astype("<f4").tobytes()
        assert hashlib.sha256(planes).hexdigest() == digest


@few
@given(
    seed=seeds, threads=threads, rows=st.integers(1, 40), heads=st.integers(1, 4), pairs=st.integers(1, 70)
)
def test_rope_has_the_references_bits(reference, kernels, seed, threads, rows, heads, pairs):
    rng = np.random.default_rng(seed)
    table = spread(rng, 3, 128, 2, pairs, binades=4)
    slots = np.array([2, -1, 0, 1], np.int32)
    positions = rng.choice(np.r_[0:128, 256:512], rows).astype(np.int32)
    x = spread(rng, rows, heads * 2 * pairs)
    assert_same(
        kernels(threads).rope(x, heads, table, slots, positions),
        reference.rope(x, heads, table, slots, positions),
    )


@pytest.mark.parametrize("head_dim", [8, 40, 64, 128, 136, 256])
@settings(few, max_examples=8)
@given(
    seed=seeds,
    threads=threads,
    heads=st.sampled_from([(1, 1), (4, 1), (6, 2), (7, 7), (16, 2), (70, 1)]),
    slices=st.lists(
        st.tuples(st.integers(0, 300), st.one_of(st.just(1), st.integers(1, 40))), min_size=1, max_size=4
    ),
    window=st.sampled_from([0, 0, 1, 3, 70, 128, 129, 200]),
    softcap=st.sampled_from([0.0, 0.0, 20.0]),
)
def test_attention_has_the_references_bits(
    reference, kernels, head_dim, seed, threads, heads, slices, window, softcap
):
    rng = np.random.default_rng(seed)
    query_heads, kv_heads = heads
    step = Step.of(slices, kv_heads, head_dim, rng)
    q = rng.standard_normal((len(step.positions), query_heads * head_dim)).astype(np.float32)
    arguments = (step, q, window, softcap, float(np.float32(head_dim**-0.5)))
    assert_same(kernels(threads).attention(*arguments), reference.attention(*arguments))


def test_a_long_prefill_has_the_references_bits(reference, kernels):
    rng = np.random.default_rng(3)
    step = Step.of([(0, 261)], 1, 32, rng)
    q = 3 * rng.standard_normal((261, 96)).astype(np.float32)
    for window in (0, 100):
        assert_same(
            kernels(3).attention(step, q, window, 0.0, 0.25), reference.attention(step, q, window, 0.0, 0.25)
        )


@pytest.mark.parametrize("operator", ["add", "silu_gate", "gelu_gate"])
@few
@given(seed=seeds, threads=threads, offset=offsets, rows=st.integers(1, 9), width=st.integers(1, 2100))
def test_elementwise_operators_have_the_references_bits(
    reference, kernels, operator, seed, threads, offset, rows, width
):
    rng = np.random.default_rng(seed)
    a, b = shifted(8 * spread(rng, rows, width), offset), spread(rng, rows, width)
    assert_same(kernels(threads).elementwise(operator, a, b), reference.elementwise(operator, a, b))


@few
@given(seed=seeds, threads=threads, width=st.integers(1, 3000), cap=st.sampled_from([30.0, 50.0, 0.7]))
def test_softcap_has_the_references_bits(reference, kernels, seed, threads, width, cap):
    x = 100 * spread(np.random.default_rng(seed), 2, width)
    assert_same(
        kernels(threads).elementwise("softcap", x, constant=cap),
        reference.elementwise("softcap", x, constant=cap),
    )


@few
@given(seed=seeds, threads=threads, rows=st.integers(1, 5), width=st.integers(1, 5000))
def test_choosing_a_token_has_the_references_bits(reference, kernels, seed, threads, rows, width):
    rng = np.random.default_rng(seed)
    x = (rng.integers(-40, 40, (rows, width)) * np.float32(0.25)).astype(np.float32)
    x[rng.random(x.shape) < 0.1] = -0.0
    side = kernels(threads)
    assert_same(side.argmax(x), reference.argmax(x))
    assert_same(side.log_normaliser(x), reference.log_normaliser(x))
    for temperature in (1.0, 0.3, 1e-30):
        assert_same(side.token_weights(x[0], temperature), reference.token_weights(x[0], temperature))
    ids = rng.integers(0, width, 17).astype(np.int32)  # some twice
    repetition, subtract = spread(rng, 17) + 2, spread(rng, 17)
    assert_same(
        side.penalise(x[0], ids, repetition, subtract), reference.penalise(x[0], ids, repetition, subtract)
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_references_bits_all_over_their_domain(reference, kernels, name):
    x = domain(name, np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32))
    assert_same(kernels(2).function(name, x), reference.function(name, x))


@pytest.mark.skipif(not os.environ.get("VOX_TEST_LONG"), reason="takes an hour; VOX_TEST_LONG=1 runs it")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_have_the_references_bits_on_every_float(reference, kernels, name):
    for first in range(0, 2**32, 2**24):
        x = domain(name, np.arange(first, first + 2**24, dtype=np.uint64).astype(np.uint32))
        if x.size:
            assert_same(kernels(2).function(name, x), reference.function(name, x))
