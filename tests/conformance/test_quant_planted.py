"""The vectors of these tests can fail: classic mistakes in integer dots change bytes on them.

Each mistake is a plain function from codes to a block's sum; applied to vectors of the kind that
`test_quant_linear` uses, it must give another sum than the true one.
"""

from __future__ import annotations

import numpy as np
import pytest

from oracle.ggml_blocks import parse_block, random_blocks


def saturating_pairs(w: np.ndarray, a: np.ndarray) -> int:
    """vpmaddubsw on w + 128: two products meet in 16 bits."""
    pairs = ((w + 128) * a).reshape(-1, 2).sum(axis=1)
    return int(np.clip(pairs, -32768, 32767).sum() - 128 * a.sum())


def no_compensation(w: np.ndarray, a: np.ndarray) -> int:
    """The unsigned side's + 128 left in."""
    return int(((w + 128) * a).sum())


def wrapped_minimum(w: np.ndarray, a: np.ndarray) -> int:
    """sign(w, a): -128 negated in 8 bits stays -128."""
    signed = np.where(a < 0, -w, w).astype(np.int8).astype(int)
    return int((signed * abs(a)).sum())


def swapped_nibbles(w: np.ndarray, a: np.ndarray) -> int:
    """Nibbles as neighbours instead of sixteen columns apart."""
    return int((w.reshape(2, 16).T.reshape(-1) * a).sum())


LOWEST_Q8 = np.full(32, -128)
EXTREME_A = np.full(32, 127)
NEGATIVE_A = np.full(32, -127)


@pytest.mark.parametrize(
    ("mistake", "w", "a"),
    [
        (saturating_pairs, np.full(32, 127), NEGATIVE_A),
        (saturating_pairs, np.full(32, 127), EXTREME_A),
        (no_compensation, LOWEST_Q8, EXTREME_A),
        (wrapped_minimum, LOWEST_Q8, NEGATIVE_A),
    ],
)
def test_extreme_codes_expose_the_mistake(mistake, w, a):
    assert mistake(w, a) != int((w * a).sum())


@pytest.mark.parametrize("weight_format", ["q4_0", "q5_0"])
def test_random_codes_expose_a_wrong_nibble_order(weight_format):
    rng = np.random.default_rng(4)
    w = np.array(parse_block(weight_format, random_blocks(weight_format, 1, rng).tobytes()).codes)
    a = rng.integers(-127, 128, 32)
    assert swapped_nibbles(w, a) != int((w * a).sum())


def test_the_extremes_fit_the_integers():
    """Where the sums must fit: |S| below 2^22 for blocks of 32, |U| and |V| in int32 for super-blocks."""
    assert 32 * 128 * 127 < 2**22
    assert 8 * 63 * 32 * 31 * 127 < 2**31  # Q5_K
    assert 16 * 128 * 16 * 32 * 127 < 2**31  # Q6_K
    assert 8 * 63 * 32 * 127 < 2**31  # V
    assert 32 * 127 < 2**15  # a sum of 32 codes, kept in int16
    assert 2 * 128 * 127 < 2**15 and 2 * 63 * 127 < 2**15  # pairs in vpmaddubsw
