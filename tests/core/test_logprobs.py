"""Logprobs: one rounding, ranked by logit, ties to the lower id."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mens_core.logprobs import score_token, top_ids
from mens_core.philox import philox_words

floats = st.floats(-30, 30, width=32)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0]) | floats, min_size=1, max_size=40), st.integers(0, 20)
)
def test_the_ranking_is_a_stable_sort_by_logit(logits, count):
    row = np.array(logits, np.float32)
    assert top_ids(row, count) == sorted(range(len(logits)), key=lambda i: (-logits[i] + 0.0, i))[:count]


@pytest.mark.parametrize("values", [3, 50, 2**31])
@pytest.mark.parametrize("size", [511, 512, 513, 5000, 151_669])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_a_large_row_ranks_the_same_as_by_sorting(values, size, count):
    row = (philox_words(5, 9, size, size) % np.uint32(values)).astype(np.float32)
    assert top_ids(row, count) == np.argsort(-row.astype(np.float64), kind="stable")[:count].tolist()


@settings(deadline=None)
@given(st.lists(floats, min_size=3, max_size=9), floats)
def test_a_logprob_is_one_rounded_subtraction(logits, normaliser):
    row = np.array(logits, np.float32)
    token = score_token(row, np.float32(normaliser), 2, 1)
    exact = Fraction(float(row[2])) - Fraction(float(np.float32(normaliser)))
    # float() of a Fraction rounds to 53 bits; twice rounding is harmless for a 24-bit difference.
    expected = np.float32(float(exact))
    assert token.logprob == (expected if abs(expected) >= 2.0**-126 else 0.0)
    assert token.top[0].token_id == int(np.argmax(row))


def test_the_chosen_token_comes_with_the_likeliest_ones():
    token = score_token(np.array([1, 3, 2, 3], np.float32), np.float32(4), 0, 3)
    assert (token.token_id, token.logprob) == (0, -3.0)
    assert [(t.token_id, t.logprob) for t in token.top] == [(1, -1.0), (3, -1.0), (2, -2.0)]
