"""What the canonical arithmetic is worth: the CPU lane against float64, within derived bounds.

u = 2^-24 is the error of one rounding. The kernels equal the scalar reference
(test_cpu_same_bits), so the reference alone is judged.
"""

from __future__ import annotations

import numpy as np
import pytest

from lanes.cpu_calls import Step, as_format, domain

U = 2.0**-24
TINY = 2.0**-126


def sweep(name):
    return domain(name, np.arange(0, 2**32, 1009, dtype=np.uint64).astype(np.uint32))


def ulps(found, exact):
    """Errors in units of the last place of the exact value's float32."""
    return np.abs(found - exact) / np.spacing(np.maximum(np.abs(exact), TINY).astype(np.float32)).astype(
        np.float64
    )


def test_exp_is_within_one_ulp(reference):
    x = sweep("exp")
    found, exact = reference.function("exp", x).astype(np.float64), np.exp(x.astype(np.float64))
    assert ulps(found, exact)[x >= -87].max() < 0.9
    assert not found[x < -87].any()


def test_log_is_within_one_ulp(reference):
    x = sweep("log")
    assert ulps(reference.function("log", x), np.log(x.astype(np.float64))).max() < 0.9


def test_tanh_is_within_two_ulps(reference):
    x = sweep("tanh")
    x = x[np.abs(x) >= TINY]
    assert ulps(reference.function("tanh", x), np.tanh(x.astype(np.float64))).max() < 1.6


def test_tanh_keeps_zero_and_its_sign(reference):
    x = np.array([0.0, -0.0], np.float32)
    assert reference.function("tanh", x).tobytes() == x.tobytes()


@pytest.mark.parametrize(
    ("name", "power"),
    [("silu", lambda x: -x), ("gelu", lambda x: -2 * np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))],
)
def test_gates_are_off_by_what_their_exponents_rounding_costs(reference, name, power):
    """x / (1 + e^z): z's own roundings (4 u |z|, none for SiLU) and a few operations."""
    x = sweep(name)
    x = x[np.abs(x) < 1e6]
    with np.errstate(over="ignore"):
        z = power(x.astype(np.float64))
        exact = x / (1 + np.exp(z))
        bound = np.abs(exact) * ((4 * np.abs(np.minimum(z, 88)) * (name == "gelu") + 5) * U)
    # Beyond e^88 the true value is below |x| 2^-126, and so is ours.
    error = np.abs(reference.function(name, x) - exact)
    assert (error <= np.where(z < 88, bound + TINY, np.abs(x) * 2.0**-125 + TINY)).all()


@pytest.mark.parametrize("weight_format", ["f32", "f16", "bf16"])
def test_linear_errs_as_a_chain_of_128_does(reference, weight_format):
    rng = np.random.default_rng(1)
    x = rng.standard_normal((7, 1300)).astype(np.float32)
    weight = as_format(rng.standard_normal((40, 1300)).astype(np.float32), weight_format)
    wide = (weight.astype(np.uint32) << 16).view(np.float32) if weight_format == "bf16" else weight
    exact = x.astype(np.float64) @ wide.astype(np.float64).T
    size = np.abs(x).astype(np.float64) @ np.abs(wide).astype(np.float64).T
    found, _ = reference.linear(x, weight, weight_format)
    assert (np.abs(found - exact) <= (128 + 11) * U * size).all()
    # A bound that nothing could break would prove nothing: bf16 sums would break it.
    assert np.abs(found - exact).max() > 0


def test_norm_errs_by_half_its_sums_error(reference):
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((5, 700)).astype(np.float32), rng.standard_normal(700).astype(np.float32)
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6) * weight
    found, _ = reference.norm(x, weight, 1, 1e-6)
    assert (np.abs(found - exact) <= ((128 + 6) / 2 + 5) * U * np.abs(exact) + TINY).all()


@pytest.mark.parametrize("window", [0, 150])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_attention_is_softmax(reference, window, softcap):
    rng = np.random.default_rng(3)
    heads, kv_heads, head_dim, rows = 4, 2, 64, 300
    step = Step.of([(0, rows)], kv_heads, head_dim, rng)
    q = rng.standard_normal((rows, heads * head_dim)).astype(np.float32)
    found, code = reference.attention(step, q, window, softcap, 0.125)
    assert code == 0
    k, v = (
        t.reshape(rows, kv_heads, head_dim).repeat(2, axis=1).astype(np.float64) for t in (step.k, step.v)
    )
    scores = 0.125 * np.einsum("nhc,mhc->hnm", q.reshape(rows, heads, head_dim).astype(np.float64), k)
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    n, m = np.mgrid[0:rows, 0:rows]
    is_seen = (m <= n) & ((m > n - window) if window else True)
    weights = np.where(is_seen, np.exp(scores - scores.max(axis=2, keepdims=True)), 0)
    weights /= weights.sum(axis=2, keepdims=True)
    exact = np.einsum("hnm,mhc->nhc", weights, v).reshape(rows, -1)
    # Scores err by (64 + 2) u |q||k| / 8 (about 5 at these sizes); two chains of 128 follow.
    bound = (66 * 5 + 2 * 130) * U * np.abs(v).max()
    assert np.abs(found - exact).max() < bound


def test_token_weights_are_probabilities_to_thirty_two_bits(reference):
    x = np.random.default_rng(4).normal(0, 5, 3000).astype(np.float32)
    exact = np.exp((x.astype(np.float64) - x.max()) / np.float32(0.7)) * 2.0**32
    found = reference.token_weights(x, 0.7).astype(np.float64)
    distance = np.abs(x - x.max()) / 0.7
    assert (np.abs(found - exact) <= exact * (2 * distance + 2) * U + 1).all()
    assert found.max() == 2.0**32


def test_the_log_normaliser_is_the_log_of_the_sum(reference):
    x = np.random.default_rng(5).normal(0, 3, (3, 5000)).astype(np.float32)
    exact = np.log(np.exp(x.astype(np.float64)).sum(axis=1))
    found, _ = reference.log_normaliser(x)
    assert (np.abs(found - exact) < (128 + 40 + 20) * U + 2 * U * np.abs(exact)).all()
