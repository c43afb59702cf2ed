"""What the backward operators are worth: the scalar reference against float64 gradients, within
derived bounds (oracle/float64_backward.py); and those gradients against finite differences of the
forward's formulas and against torch's autograd.

The kernels equal the scalar reference (test_backward_same_bits), so the reference alone is judged.
"""

from __future__ import annotations

import numpy as np
import pytest

from lanes.backward_calls import BackwardNative, filled, gradients
from lanes.cpu_calls import Step, domain
from oracle import float64_backward as exact

EPS = 1e-6


@pytest.fixture(scope="module")
def side(library):
    return BackwardNative(library, None)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def assert_within(found, expected, bound):
    error = np.abs(found.astype(np.float64) - expected)
    assert (error <= bound).all(), f"{(error / bound).max():.3g} of the bound"
    # A bound that nothing could break would prove nothing.
    assert error.max() > 0
    assert np.median(bound) < 2e-4 * np.abs(expected).max(), "the bound is too wide to show a mistake"


# --- the reference within the bounds ------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 700])
def test_norm(side, width):
    rng = np.random.default_rng(1)
    x, dy, weight = normal(rng, 6, width), normal(rng, 6, width), normal(rng, width)
    dy[0] = x[0] / weight  # dy w along x: what is left is nearly nothing
    found, code = side.norm_backward(dy, x, weight, 1, EPS)
    assert code == 0
    assert_within(found, *exact.norm(*(t.astype(np.float64) for t in (dy, x, weight)), EPS))


def test_rope(side):
    rng = np.random.default_rng(2)
    table = normal(rng, 1, 128, 2, 20)
    dy, positions = normal(rng, 128, 40), np.arange(128, dtype=np.int32)
    found, _ = side.rope_backward(dy, 1, table, np.zeros(1, np.int32), positions)
    cosines, sines = table[0].astype(np.float64).transpose(1, 0, 2)
    expected, bound = exact.rope(dy.astype(np.float64), cosines, sines)
    assert_within(found, expected, bound)


@pytest.mark.parametrize("name", ["silu", "gelu"])
def test_gates_over_all_exponents(side, name):
    rng = np.random.default_rng(3)
    patterns = np.concatenate(
        [
            np.arange(0, 2**32, 100_003, dtype=np.uint64).astype(np.uint32),
            rng.uniform(-12, 12, 50_000).astype(np.float32).view(np.uint32),
        ]
    )
    gate = domain(name, patterns)
    gate = gate[np.abs(gate) < 1e6][None]
    dy, up = normal(rng, *gate.shape), normal(rng, *gate.shape)
    (dgate, dup), code = side.gate_backward(f"{name}_gate_backward", dy, gate, up)
    assert code == 0
    wide = [t.astype(np.float64) for t in (dy, gate, up)]
    gradient = exact.silu_gate(*wide) if name == "silu" else exact.gelu_gate(*wide)
    for found, expected, bound in (
        (dgate, gradient.dgate, gradient.dgate_bound),
        (dup, gradient.dup, gradient.dup_bound),
    ):
        assert (np.abs(found - expected) <= bound).all()


def test_softcap_over_all_exponents(side):
    x = domain("tanh", np.arange(0, 2**32, 100_003, dtype=np.uint64).astype(np.uint32))[None]
    dy = normal(np.random.default_rng(4), *x.shape)
    found, code = side.softcap_backward(dy, x, 30.0)
    assert code == 0
    expected, bound = exact.softcap(dy.astype(np.float64), x.astype(np.float64), 30.0)
    assert (np.abs(found - expected) <= bound).all()


def test_derivatives_are_as_good_as_the_page_says(side):
    rng = np.random.default_rng(9)
    patterns = np.arange(0, 2**32, 50_021, dtype=np.uint64).astype(np.uint32)
    near = rng.uniform(-12, 12, 200_000).astype(np.float32).view(np.uint32)
    x = domain("tanh", np.concatenate([patterns, near]))[None]
    x = x[np.abs(x) < 1e6][None]
    ones = np.ones_like(x)
    wide = x.astype(np.float64), ones.astype(np.float64)
    for name, gradient in (
        ("silu", exact.silu_gate(wide[1], *wide)),
        ("gelu", exact.gelu_gate(wide[1], *wide)),
    ):
        (slope, _), _ = side.gate_backward(f"{name}_gate_backward", ones, x, ones)
        assert np.abs(slope - gradient.dgate).max() < 4 * exact.U
    x = x[np.abs(x) < 43][None]
    expected, _ = exact.softcap(np.ones_like(x, np.float64), x.astype(np.float64), 1.0)
    found, _ = side.softcap_backward(np.ones_like(x), x, 1.0)
    unit = np.spacing(expected.astype(np.float32)).astype(np.float64)
    assert (np.abs(found - expected) < 5 * unit).all()


LAYERS = [(None, None), (150, None), (None, 4.0), (40, 4.0)]
"""Window, softcap."""


def case(window, cap, n=300, channels=24):
    rng = np.random.default_rng(5)
    step = filled(Step.of([(0, n)], 2, channels, rng))
    q, dy = normal(rng, n, 4 * channels), normal(rng, n, 4 * channels)
    scale = float(np.float32(channels**-0.5))
    shapes = [t.astype(np.float64).reshape(n, -1, channels) for t in (dy, q, step.k, step.v)]
    return step, q, dy, (window or 0, cap or 0.0, scale), shapes


@pytest.mark.parametrize(("window", "cap"), LAYERS)
def test_attention(side, window, cap):
    step, q, dy, constants, wide = case(window, cap)
    saved, _ = side.attention_saving(step, q, *constants)
    made, code = side.attention_backward(step, dy, q, saved, *constants)
    assert code == 0
    expected = exact.attention(*wide, constants[2], window, cap)
    dq, dk, dv = (t.reshape(len(q), -1, 24) for t in gradients(step, q, made))
    assert_within(dq[1:], expected.dq[1:], expected.dq_bound[1:])
    assert_within(dk, expected.dk, expected.dk_bound)
    assert_within(dv, expected.dv, expected.dv_bound)
    # Position 0 sees itself alone: its probability is 1 whatever its score, so dq is rounding alone.
    assert (np.abs(dq[0]) <= expected.dq_bound[0]).all()


# --- the float64 gradients themselves -------------------------------------------------------------


def rms_norm(x, weight):
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPS) * weight


def silu_gate(gate, up):
    return gate / (1 + np.exp(-gate)) * up


def gelu_gate(gate, up):
    return gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up


def attend(q, k, v, scale, window, cap):
    n, group = len(q), q.shape[1] // k.shape[1]
    s = scale * np.einsum("ihc,jhc->hij", q, k.repeat(group, axis=1))
    if cap is not None:
        s = cap * np.tanh(s / cap)
    i, j = np.mgrid[0:n, 0:n]
    s = np.where((j <= i) & ((i - j < window) if window else True), s, -np.inf)
    p = np.exp(s - s.max(axis=2, keepdims=True))
    return np.einsum("hij,jhc->ihc", p / p.sum(axis=2, keepdims=True), v.repeat(group, axis=1))


def assert_slopes(loss, arguments, found):
    """Directional derivatives by central differences: wrong by h^2 of third derivatives, here near 1e-9."""
    rng, h = np.random.default_rng(6), 1e-5
    for which, gradient in enumerate(found):
        for _ in range(4):
            direction = rng.standard_normal(gradient.shape)

            def moved(step, which=which, direction=direction):
                return loss(*(a + step * direction if i == which else a for i, a in enumerate(arguments)))

            slope = (moved(h) - moved(-h)) / (2 * h)
            size = np.abs(gradient * direction).sum()
            assert abs(slope - (gradient * direction).sum()) < 1e-7 * size


def test_gradients_are_the_slopes_of_the_forward():
    rng = np.random.default_rng(7)
    dy, x, up = (rng.standard_normal((3, 50)) for _ in range(3))
    weight = rng.standard_normal(50)
    assert_slopes(lambda a: (rms_norm(a, weight) * dy).sum(), [x], [exact.norm(dy, x, weight, EPS)[0]])
    for forward, gradient in (
        (silu_gate, exact.silu_gate(dy, 3 * x, up)),
        (gelu_gate, exact.gelu_gate(dy, 3 * x, up)),
    ):
        assert_slopes(
            lambda a, b, forward=forward: (forward(a, b) * dy).sum(),
            [3 * x, up],
            [gradient.dgate, gradient.dup],
        )
    capped = exact.softcap(dy, 3 * x, 2.0)[0]
    assert_slopes(lambda a: (2 * np.tanh(a / 2) * dy).sum(), [3 * x], [capped])
    angles = rng.standard_normal((3, 25))

    def rotate(a):
        a1, a2 = np.split(a, 2, axis=1)
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([a1 * cosines - a2 * sines, a2 * cosines + a1 * sines], axis=1)

    turned = exact.rope(dy, np.cos(angles), np.sin(angles))[0]
    assert_slopes(lambda a: (rotate(a) * dy).sum(), [x], [turned])


@pytest.mark.parametrize(("window", "cap"), [(None, None), (5, None), (None, 4.0)])
def test_gradients_of_attention_are_its_slopes(window, cap):
    _, _, _, (_, _, scale), (dy, q, k, v) = case(window, cap, n=20)
    gradient = exact.attention(dy, q, k, v, scale, window, cap)
    assert_slopes(
        lambda *arguments: (attend(*arguments, scale, window, cap) * dy).sum(),
        [q, k, v],
        [gradient.dq, gradient.dk, gradient.dv],
    )


@pytest.mark.oracle
@pytest.mark.parametrize(("window", "cap"), LAYERS)
def test_gradients_of_attention_are_those_of_torch(window, cap):
    torch = pytest.importorskip("torch")
    _, _, _, (_, _, scale), wide = case(window, cap, n=140)
    dy, q, k, v = (torch.tensor(t) for t in wide)
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    s = scale * torch.einsum("ihc,jhc->hij", q, k.repeat_interleave(2, 1))
    if cap is not None:
        s = cap * torch.tanh(s / cap)
    i, j = np.mgrid[0:140, 0:140]
    masked = torch.tensor((j > i) | ((i - j >= window) if window else False))
    p = torch.softmax(s.masked_fill(masked, -torch.inf), dim=2)
    torch.einsum("hij,jhc->ihc", p, v.repeat_interleave(2, 1)).backward(dy)
    gradient = exact.attention(*wide, scale, window, cap)
    for found, expected in ((gradient.dq, q.grad), (gradient.dk, k.grad), (gradient.dv, v.grad)):
        assert np.abs(found - expected.numpy()).max() < 1e-12


@pytest.mark.oracle
def test_gradients_of_elementwise_operators_are_those_of_torch():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(8)
    dy, x, up = (rng.standard_normal((3, 50)) for _ in range(3))
    weight = rng.standard_normal(50)

    def grad(forward, *arguments):
        leaves = [torch.tensor(a, requires_grad=True) for a in arguments]
        forward(*leaves).backward(torch.tensor(dy))
        return [leaf.grad.numpy() for leaf in leaves]

    f = torch.nn.functional
    silu, gelu = exact.silu_gate(dy, 4 * x, up), exact.gelu_gate(dy, 4 * x, up)
    wide_weight = torch.tensor(weight)
    pairs = [
        ([silu.dgate, silu.dup], grad(lambda a, b: f.silu(a) * b, 4 * x, up)),
        ([gelu.dgate, gelu.dup], grad(lambda a, b: f.gelu(a, approximate="tanh") * b, 4 * x, up)),
        ([exact.softcap(dy, 4 * x, 3.0)[0]], grad(lambda a: 3 * torch.tanh(a / 3), 4 * x)),
        (
            [exact.norm(dy, x, weight, EPS)[0]],
            grad(lambda a: f.rms_norm(a, (50,), wide_weight, EPS), x),
        ),
    ]
    for found, expected in pairs:
        for mine, theirs in zip(found, expected, strict=True):
            assert np.abs(mine - theirs).max() < 1e-12
