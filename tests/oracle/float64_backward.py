"""Gradients of the forward's operators in float64, by calculus, and how far float32 ones may be from them.

Nothing here knows an order of operations. A bound is what section 12 of docs/numerics.md costs to
first order in u = 2^-24: each rounding adds u of what it rounds; a C128 of K terms adds
(min(K, 128) + K / 128) u of the sum of its terms' magnitudes; exp and tanh add 1.8 and 3.2 u
(0.9 and 1.6 ulp). Second orders, and what is flushed, are in the slack of a tenth and in TINY.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U = 2.0**-24
TINY = 2.0**-125
SLACK = 1.1
Array = npt.NDArray[np.float64]


def chain_cost(terms: int) -> float:
    """Roundings that a term of a C128 goes through, at most."""
    return min(terms, 128) + -(-terms // 128)


def norm(dy: Array, x: Array, weight: Array, eps: float) -> tuple[Array, Array]:
    """Gradient of rms_norm with respect to x, and its bound: rows."""
    width = x.shape[1]
    inverse = 1 / np.sqrt((x * x).mean(axis=1, keepdims=True) + eps)
    g, normed = dy * weight, x * inverse
    c = (g * normed).mean(axis=1, keepdims=True)
    # s is off by a C128, a division and an addition; its root by half of that, and two more.
    root = (chain_cost(width) + 3) / 2 + 2
    most = np.abs(g * normed).mean(axis=1, keepdims=True)
    # g: its rounding, the last two operations, inv. n c: inv three times, d's sum, eight operations.
    bound = np.abs(g) * (root + 3) + np.abs(normed) * most * (chain_cost(width) + 3 * root + 8)
    return (g - normed * c) * inverse, SLACK * U * bound * inverse


def rope(dy: Array, cosines: Array, sines: Array) -> tuple[Array, Array]:
    """One head: rows of two halves."""
    d1, d2 = np.split(dy, 2, axis=1)
    exact = np.concatenate([d1 * cosines + d2 * sines, d2 * cosines - d1 * sines], axis=1)
    first = np.abs(d1 * cosines) + np.abs(d2 * sines)
    second = np.abs(d2 * cosines) + np.abs(d1 * sines)
    return exact, SLACK * 2 * U * np.concatenate([first, second], axis=1)


@dataclass(frozen=True)
class Gate:
    """Gradients of activation(gate) * up."""

    dgate: Array
    dup: Array
    dgate_bound: Array
    dup_bound: Array


def silu_gate(dy: Array, gate: Array, up: Array) -> Gate:
    return _gate(dy, gate, up, -gate, np.ones_like(gate), 0.0)


def gelu_gate(dy: Array, gate: Array, up: Array) -> Gate:
    root = np.sqrt(2 / np.pi)
    exponent = -2 * root * (gate + 0.044715 * gate**3)
    slope = 2 * root * (1 + 3 * 0.044715 * gate**2)
    # The exponent: x x, the line, its constants, the product.
    return _gate(dy, gate, up, exponent, slope, 4.0)


def _gate(dy: Array, x: Array, up: Array, exponent: Array, slope: Array, exponent_cost: float) -> Gate:
    """x sigmoid(-exponent) up, with `slope` minus the exponent's derivative."""
    e = np.exp(np.minimum(exponent, 300))
    r = 1 / (1 + e)
    q = np.where(e > 1, 1 - r, e * r)
    a, bend = x * r, x * r * q * slope
    cost = exponent_cost * np.minimum(np.abs(exponent), 88) + 1.8  # of e, in u of it
    # Subnormals, and sigmoid and e below exp(-87), are zero: they and their products are lost.
    lost = TINY * (1 + np.abs(x * slope)) * (1 + np.abs(dy * up) + np.abs(dy))
    return Gate(
        dgate=dy * up * (r + bend),
        dup=dy * a,
        dgate_bound=SLACK * U * np.abs(dy * up) * (np.abs(bend) * (3 * cost + 14) + r * (cost + 6)) + lost,
        dup_bound=SLACK * U * np.abs(dy * a) * (cost + 3) + (1 + np.abs(x)) * lost,
    )


def softcap(dy: Array, x: Array, cap: float) -> tuple[Array, Array]:
    a = np.abs(x / cap)
    e = np.exp(-2 * a)
    exact = dy * 4 * e / (1 + e) ** 2
    # e: the division's rounding grows by 2 a.
    return exact, SLACK * U * np.abs(exact) * (3 * (2 * a + 1.8) + 7) + TINY * (1 + np.abs(dy))


@dataclass(frozen=True)
class AttentionGradients:
    """Of one sequence: [positions, heads or kv_heads, channels], each with its bound."""

    dq: Array
    dk: Array
    dv: Array
    dq_bound: Array
    dk_bound: Array
    dv_bound: Array


def attention(
    dy: Array, q: Array, k: Array, v: Array, scale: float, window: int | None, cap: float | None
) -> AttentionGradients:
    """One sequence from its beginning; q and dy [n, H, C], k and v [n, G, C]."""
    n, heads, channels = q.shape
    group = heads // k.shape[1]
    k_all, v_all = (t.repeat(group, axis=1) for t in (k, v))
    i, j = np.mgrid[0:n, 0:n]
    seen = (j <= i) & ((i - j < window) if window else True)

    def over_channels(a: Array, b: Array) -> Array:
        return np.einsum("ihc,jhc->hij", a, b)

    x = scale * over_channels(q, k_all)
    s = x if cap is None else cap * np.tanh(x / cap)
    slope = np.ones_like(x) if cap is None else 1 / np.cosh(x / cap) ** 2
    m = np.where(seen, s, -np.inf).max(axis=2, keepdims=True)
    p = np.where(seen, np.exp(s - m), 0)
    p /= p.sum(axis=2, keepdims=True)
    out = np.einsum("hij,jhc->ihc", p, v_all)
    dp = over_channels(dy, v_all)
    delta = np.einsum("ihc,ihc->hi", dy, out)[:, :, None]
    ds = p * (dp - delta) * slope

    dot, blocks = chain_cost(channels), -(-n // 128)
    # Scores: the dot product, the scale, the softcap's division, tanh and product.
    s_off = (dot + 1) * scale * over_channels(np.abs(q), np.abs(k_all))
    if cap is not None:
        s_off = s_off + 5.2 * np.abs(s)
    worst = np.where(seen, s_off + np.abs(s - m), 0).max(axis=2, keepdims=True) + 1.8
    # P: its own exponential and those in l, a chain, up to three exponentials a block to fold, a division.
    p_off = 2 * worst + min(n, 128) + 8 * blocks + 2
    out_off = np.einsum("hij,jhc->ihc", p * (p_off + min(n, 128) + 8 * blocks), np.abs(v_all))
    delta_off = np.einsum("ihc,ihc->hi", np.abs(dy), out_off + (dot + 1) * np.abs(out))[:, :, None]
    dp_off = dot * over_channels(np.abs(dy), np.abs(v_all))
    slope_off = 0.0 if cap is None else 3 * (2 * (np.abs(x) + s_off) / cap + 1.8) + 7
    ds_size = p * (np.abs(dp) + np.abs(delta)) * slope
    ds_off = ds_size * (p_off + slope_off + 3) + p * slope * (dp_off + delta_off)
    by_key = min(n, 128) + group * blocks

    def grouped(t: Array) -> Array:
        return t.reshape(n, heads // group, group, channels).sum(axis=2)

    def over_keys(w: Array, t: Array) -> Array:
        return np.einsum("hij,jhc->ihc", w, t)

    def over_queries(w: Array, t: Array) -> Array:
        return grouped(np.einsum("hij,ihc->jhc", w, t))

    ds_all = ds_off + ds_size * (by_key + 1)
    return AttentionGradients(
        dq=scale * over_keys(ds, k_all),
        dk=scale * over_queries(ds, q),
        dv=over_queries(p, dy),
        dq_bound=SLACK * U * scale * over_keys(ds_all, np.abs(k_all)),
        dk_bound=SLACK * U * scale * over_queries(ds_all, np.abs(q)),
        dv_bound=SLACK * U * over_queries(p * (p_off + by_key), np.abs(dy)),
    )
