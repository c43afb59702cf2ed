from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vox_host.training.rates import compare, rate_of

outcomes = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80)


def pairs(both, lost, gained, neither):
    before = [True] * (both + lost) + [False] * (gained + neither)
    after = [True] * both + [False] * lost + [True] * gained + [False] * neither
    return compare(before, after)


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17, 857-872), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilsons_interval_is_the_published_one(successes, total, low, high):
    rate = rate_of([True] * successes + [False] * (total - successes))
    assert (round(rate.low, 4), round(rate.high, 4)) == (low, high)
    assert (rate.successes, rate.total) == (successes, total)


@given(st.lists(st.booleans(), min_size=1, max_size=300))
def test_a_bound_is_where_the_share_is_196_standard_errors_away(values):
    rate = rate_of(values)
    assert 0 <= rate.low <= rate.value <= rate.high <= 1
    for bound in {rate.low, rate.high} - {0.0, 1.0}:
        error = math.sqrt(bound * (1 - bound) / rate.total)
        assert math.isclose(abs(rate.value - bound) / error, 1.959964, rel_tol=1e-5)
    assert (rate.low == 0) == (not any(values)) and (rate.high == 1) == all(values)


def test_mcnemar_counts_coin_flips():
    assert pairs(5, 0, 0, 5).p_value == 1.0
    assert pairs(0, 0, 6, 0).p_value == 2 / 2**6
    assert pairs(3, 1, 9, 2).p_value == 2 * (1 + 10) / 2**10
    assert pairs(3, 9, 1, 2).p_value == pairs(3, 1, 9, 2).p_value
    assert pairs(0, 4, 4, 0).p_value == 1.0
    flips = itertools.product((0, 1), repeat=10)
    assert pairs(0, 1, 9, 0).p_value == sum(sum(flip) in (0, 1, 9, 10) for flip in flips) / 2**10


@given(outcomes)
def test_a_comparison_turned_round_is_turned_round(values):
    before, after = map(list, zip(*values, strict=True))
    there, back = compare(before, after), compare(after, before)
    assert math.isclose(there.low, -back.high, abs_tol=1e-12)
    assert math.isclose(there.high, -back.low, abs_tol=1e-12)
    assert (there.gained, there.lost) == (back.lost, back.gained)
    assert -1 - 1e-12 <= there.low <= there.difference <= there.high <= 1 + 1e-12


@pytest.mark.parametrize(
    "shares", [(0.6, 0.05, 0.25, 0.1), (0.02, 0.02, 0.5, 0.46), (0.25, 0.25, 0.25, 0.25)]
)
def test_the_interval_of_a_difference_covers_the_truth_in_95_of_100_cases(shares):
    """All outcomes of 30 questions with their probabilities: an exact count, no simulation."""
    n, covered = 30, 0.0
    truth = shares[2] - shares[1]
    for both in range(n + 1):
        for lost in range(n + 1 - both):
            for gained in range(n + 1 - both - lost):
                neither = n - both - lost - gained
                ways = math.factorial(n) // math.prod(map(math.factorial, (both, lost, gained, neither)))
                probability = ways * math.prod(
                    share**count for share, count in zip(shares, (both, lost, gained, neither), strict=True)
                )
                found = pairs(both, lost, gained, neither)
                covered += probability * (found.low <= truth <= found.high)
    assert 0.935 < covered < 0.985


def test_pairs_that_agree_make_the_interval_narrower():
    agree, differ = pairs(40, 0, 10, 50), pairs(20, 20, 30, 30)
    assert agree.difference == pytest.approx(differ.difference)
    assert agree.high - agree.low < differ.high - differ.low
    assert agree.is_improved and not differ.is_improved


def test_what_is_compared_must_be_pairs():
    with pytest.raises(ValueError, match="no pairs"):
        compare([True], [True, False])
    with pytest.raises(ValueError, match="no outcomes"):
        compare([], [])


def test_a_report_says_before_and_after_with_intervals():
    assert str(pairs(2, 0, 98, 20)) == (
        "before 2 of 120 (1.7%; 95% interval 0.5% to 5.9%); "
        "after 100 of 120 (83.3%; 95% interval 75.7% to 88.9%); "
        "difference +81.7% (95% interval +72.9% to +87.4%; 98 gained, 0 lost, exact McNemar p = 6.3e-30)"
    )
