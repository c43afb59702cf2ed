"""The scalar reference against the page's text on Python integers, on sampled vectors, by bytes."""

from __future__ import annotations

import numpy as np
import pytest

from lanes.backward_calls import BackwardNative, filled, gradients
from lanes.cpu_calls import Step, domain
from oracle import backward_integers as backward
from oracle import float_integers as forward
from oracle.softfloat import BetweenLanesError

EPS = 1e-6


@pytest.fixture(scope="module")
def side(library):
    return BackwardNative(library, None)


def spread(rng, *shape, binades=12):
    return np.ldexp(rng.standard_normal(shape), rng.integers(-binades, 3, shape)).astype(np.float32)


def bits(values) -> list:
    """The bits of an array of floats as nested lists of integers."""
    return np.ascontiguousarray(values, np.float32).view(np.uint32).tolist()


def bit(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


# --- functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", forward.FUNCTIONS)
def test_elementary_functions(side, name):
    rng = np.random.default_rng(1)
    patterns = np.concatenate(
        [
            np.arange(0, 2**32, 4_000_037, dtype=np.uint64).astype(np.uint32),
            rng.uniform(-90, 88, 1500).astype(np.float32).view(np.uint32),
            rng.uniform(-2, 2, 500).astype(np.float32).view(np.uint32),
            np.float32([0.625, 88, -87, -87.00001, 9.98, -10.1, 1, 2**-126, 0, -0.0]).view(np.uint32),
        ]
    )
    x = domain(name, patterns)
    found = bits(side.function(name, x))
    compared = 0
    for at, y in zip(bits(x), found, strict=True):
        try:
            expected = forward.FUNCTIONS[name](at)
        except BetweenLanesError:
            continue
        assert y == expected, f"{name}({at:08x})"
        compared += 1
    assert compared > 0.99 * len(x)


# --- the forward ---------------------------------------------------------------------------------


def test_linear(side):
    rng = np.random.default_rng(2)
    x, weight = spread(rng, 2, 300), spread(rng, 3, 300)
    found, _ = side.linear(x, weight, "f32")
    assert bits(found) == [[forward.c128(a, w) for w in bits(weight)] for a in bits(x)]


def test_norm(side):
    rng = np.random.default_rng(3)
    x, weight = spread(rng, 2, 2 * 300), spread(rng, 300)
    found, _ = side.norm(x, weight, 2, EPS)
    heads = x.reshape(4, 300)
    expected = [forward.norm(a, bits(weight), bit(EPS)) for a in bits(heads)]
    assert bits(found.reshape(4, 300)) == expected


def rotary(rng):
    table = spread(rng, 1, 128, 2, 20, binades=4)
    return table, np.zeros(1, np.int32), np.array([0, 5, 127], np.int32)


def test_rope(side):
    rng = np.random.default_rng(4)
    table, slots, positions = rotary(rng)
    x = spread(rng, 3, 2 * 40)
    found, _ = side.rope(x, 2, table, slots, positions)
    for row, position in enumerate(positions):
        for head in range(2):
            part = slice(head * 40, head * 40 + 40)
            expected = forward.rope(bits(x[row, part]), *bits(table[0, position]))
            assert bits(found[row, part]) == expected


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gates(side, name):
    rng = np.random.default_rng(5)
    gate, up = 8 * spread(rng, 1, 400), spread(rng, 1, 400)
    found, _ = side.elementwise(f"{name}_gate", gate, up)
    function = forward.FUNCTIONS[name]
    pairs = zip(bits(gate[0]), bits(up[0]), strict=True)
    assert bits(found[0]) == [forward.multiply(function(g), u) for g, u in pairs]


def test_softcap(side):
    x = 100 * spread(np.random.default_rng(6), 1, 400)
    found, _ = side.elementwise("softcap", x, constant=30.0)
    assert bits(found[0]) == [forward.softcap(a, bit(30)) for a in bits(x[0])]


def test_choosing_tokens(side):
    x = np.random.default_rng(7).normal(0, 3, (1, 300)).astype(np.float32)
    assert bits(side.log_normaliser(x)[0]) == [forward.log_normaliser(bits(x[0]))]
    assert side.token_weights(x[0], 0.7).tolist() == forward.token_weights(bits(x[0]), bit(0.7))


LAYERS = [(None, None, 24), (70, None, 24), (200, 6.0, 16), (None, 3.0, 136)]
"""Window, softcap, channels."""


def case(window, cap, head_dim):
    rng = np.random.default_rng(8)
    step = filled(Step.of([(0, 9), (0, 270)], 1, head_dim, rng))
    q, dy = (rng.standard_normal((279, 2 * head_dim)).astype(np.float32) for _ in range(2))
    scale = float(np.float32(head_dim**-0.5))
    layer = forward.Attention(bit(scale), window, None if cap is None else bit(cap))
    return step, q, dy, layer, (window or 0, cap or 0.0, scale)


@pytest.mark.parametrize(("window", "cap", "head_dim"), LAYERS)
def test_attention(side, window, cap, head_dim):
    step, q, _, layer, constants = case(window, cap, head_dim)
    (out, m, l), code = side.attention_saving(step, q, *constants)  # noqa: E741
    assert code == 0
    keys, values = bits(step.k[9:]), bits(step.v[9:])
    for position in (0, 3, 127, 128, 201, 269):
        for head in range(2):
            channels = slice(head * head_dim, (head + 1) * head_dim)
            row = 9 + position
            expected = forward.attention(layer, position, bits(q[row, channels]), keys, values)
            assert (bits(out[row, channels]), bit(m[row, head]), bit(l[row, head])) == expected


# --- the backward --------------------------------------------------------------------------------


def test_norm_backward(side):
    rng = np.random.default_rng(9)
    x, dy, weight = spread(rng, 2, 2 * 300), spread(rng, 2, 2 * 300), spread(rng, 300)
    found, _ = side.norm_backward(dy, x, weight, 2, EPS)
    rows = zip(bits(dy.reshape(4, 300)), bits(x.reshape(4, 300)), strict=True)
    expected = [backward.norm(upstream, a, bits(weight), bit(EPS)) for upstream, a in rows]
    assert bits(found.reshape(4, 300)) == expected


def test_rope_backward(side):
    rng = np.random.default_rng(10)
    table, slots, positions = rotary(rng)
    dy = spread(rng, 3, 2 * 40)
    found, _ = side.rope_backward(dy, 2, table, slots, positions)
    for row, position in enumerate(positions):
        for head in range(2):
            part = slice(head * 40, head * 40 + 40)
            expected = backward.rope(bits(dy[row, part]), *bits(table[0, position]))
            assert bits(found[row, part]) == expected


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gate_backward(side, name):
    rng = np.random.default_rng(11)
    gate = np.concatenate(
        [8 * spread(rng, 400), rng.uniform(-95, 95, 300), np.float32([3e38, -3e38, 1e20, -1e20, 0, -0.0])]
    ).astype(np.float32)[None]
    dy, up = spread(rng, *gate.shape), spread(rng, *gate.shape)
    (dgate, dup), code = side.gate_backward(f"{name}_gate_backward", dy, gate, up)
    assert code == 0
    for d, x, u, found in zip(
        *(bits(t[0]) for t in (dy, gate, up)), zip(bits(dgate[0]), bits(dup[0]), strict=True), strict=True
    ):
        try:
            expected = backward.gate(name, d, x, u)
        except BetweenLanesError:
            continue
        assert found == expected, f"{name} of {x:08x}"


def test_softcap_backward(side):
    rng = np.random.default_rng(12)
    x = np.concatenate([100 * spread(rng, 500), np.float32([0, -0.0, 1e30, -1e30])]).astype(np.float32)[None]
    dy = spread(rng, *x.shape)
    found, _ = side.softcap_backward(dy, x, 30.0)
    expected = [backward.softcap(d, a, bit(30)) for d, a in zip(bits(dy[0]), bits(x[0]), strict=True)]
    assert bits(found[0]) == expected


@pytest.mark.parametrize(("window", "cap", "head_dim"), LAYERS)
def test_attention_backward(side, window, cap, head_dim):
    step, q, dy, layer, constants = case(window, cap, head_dim)
    saved, _ = side.attention_saving(step, q, *constants)
    made, code = side.attention_backward(step, dy, q, saved, *constants)
    assert code == 0
    dq, dk, dv = (part[9:] for part in gradients(step, q, made))

    def by_head(rows):
        return [bits(rows[9:, h * head_dim : (h + 1) * head_dim]) for h in range(2)]

    sequence = backward.SequenceBackward(
        layer, by_head(q), bits(step.k[9:]), bits(step.v[9:]), by_head(dy), by_head(saved[0]),
        *(bits(t[9:].T) for t in saved[1:]),
    )  # fmt: skip
    for position in (0, 100, 130, 269):
        head = position % 2
        assert bits(dq[position, head * head_dim : (head + 1) * head_dim]) == sequence.dq(head, position)
    for position in (0, 127, 128, 260) if head_dim < 100 else (128, 260):
        assert bits(dk[position]) == sequence.dk(position)
        assert bits(dv[position]) == sequence.dv(position)
