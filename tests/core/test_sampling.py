"""Sampling against an evaluator that sorts and counts one by one, in integers and fractions."""

from __future__ import annotations

import math
import time
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mens_core.philox import philox_words
from mens_core.sampling import Penalties, check_sampling, draw, is_greedy, keep, random_bits
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import SamplingParams

ONE = 1 << 32


def slow_keep(weights: list[int], top_k: int, top_p: float, min_p: float) -> list[int]:
    """The rules of docs/numerics.md, read aloud: the ids that stay, ascending."""
    ranked = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if top_k:
        ranked = ranked[:top_k]
    if top_p < 1:
        p, q = top_p.as_integer_ratio()
        total = sum(weights[i] for i in ranked)
        kept, reached = [], 0
        for i in ranked:
            kept.append(i)
            reached += weights[i]
            if reached * q >= p * total:
                break
        ranked = kept
    if min_p > 0:
        p, q = min_p.as_integer_ratio()
        greatest = max(weights)
        ranked = [i for i in ranked if weights[i] * q >= p * greatest]
    return sorted(ranked)


def slow_draw(weights: list[int], kept: list[int], random: int) -> int:
    r = random * sum(weights[i] for i in kept) // 2**64
    passed = 0
    for i in kept:
        passed += weights[i]
        if passed > r:
            return i
    raise AssertionError("r is below the total")


def f32(x: float) -> float:
    return float(np.float32(x))


small = st.sampled_from([0, 1, 2, 3, 255, 256, ONE - 1, ONE]) | st.integers(0, ONE)
shares = st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0]).map(f32) | st.floats(0, 1, width=32)


@settings(max_examples=400, deadline=None)
@given(
    weights=st.lists(small, min_size=0, max_size=30),
    place=st.integers(0, 30),
    top_k=st.integers(0, 40),
    top_p=shares,
    min_p=shares,
    random=st.sampled_from([0, 2**64 - 1, 2**63]) | st.integers(0, 2**64 - 1),
)
def test_the_fast_path_keeps_and_draws_what_the_slow_one_does(weights, place, top_k, top_p, min_p, random):
    weights.insert(place, ONE)  # the greatest logit always has 2^32
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    array = np.array(weights, np.uint64)
    expected = slow_keep(weights, top_k, params.top_p, params.min_p)
    ids, kept = keep(array, top_k=top_k, top_p=params.top_p, min_p=params.min_p)
    found = list(range(len(weights))) if ids is None else ids.tolist()
    # Zeros may stay or go: they can't be drawn.
    assert [i for i in found if weights[i]] == [i for i in expected if weights[i]]
    assert kept.tolist() == [weights[i] for i in found]
    assert draw(array, params, random) == slow_draw(weights, expected, random)


@pytest.mark.parametrize("spread", [0, 1, 6, 20, 32])
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 0.9, 0.0), (5000, 1.0, 0.0), (9000, 0.97, 0.001), (0, 0.3, 0.2), (64, 1.0, 0.0), (40, 0.95, 0.0)],
)
def test_large_vocabularies_take_the_narrowing_path_to_the_same_tokens(spread, ties, top_k, top_p, min_p):
    words = philox_words(7, 9, spread, 40_000).astype(np.uint64).reshape(2, -1)
    weights = words[0] >> (words[1] % np.uint64(spread + 1))
    if ties:
        weights = (weights >> np.uint64(29)) << np.uint64(29) | np.uint64(1)
    weights[12_345] = ONE
    values, top_p, min_p = weights.tolist(), f32(top_p), f32(min_p)
    expected = slow_keep(values, top_k, top_p, min_p)
    ids, _ = keep(weights, top_k=top_k, top_p=top_p, min_p=min_p)
    assert ids is not None
    assert [i for i in ids.tolist() if values[i]] == [i for i in expected if values[i]]


@pytest.mark.parametrize("count", [511, 512, 513, 1024, 5000])
def test_a_draw_finds_its_token_in_whichever_group_it_is(count):
    words = philox_words(8, 9, count, 2 * count).astype(np.uint64).reshape(2, -1)
    weights = words[0] >> (words[1] % np.uint64(33))
    weights[count // 2] = ONE
    weights[500:520] = 0  # also at the end of a group, and at the beginning of one
    weights[1030:2600] = 0  # also a whole group
    values = weights.tolist()
    total = sum(values)
    ends = np.cumsum(values, dtype=object)
    # The first and the last of the 64-bit numbers that draw each of these tokens.
    at = [*range(min(count, 3)), *range(495, min(count, 530)), *range(1020, min(count, 1040)), count - 1]
    randoms = [0, 2**64 - 1]
    for i in at:
        first = -(-int(ends[i]) * 2**64 // total)
        randoms += [random for random in (first - 1, first) if 0 <= random < 2**64]
    for random in randoms:
        expected = slow_draw(values, list(range(count)), random)
        assert draw(weights, SamplingParams(), random) == expected, random


def test_equal_weights_yield_to_the_lower_id():
    weights = np.full(10_000, ONE, np.uint64)
    ids, _ = keep(weights, top_k=3, top_p=1.0, min_p=0.0)
    assert ids is not None
    assert ids.tolist() == [0, 1, 2]
    ids, _ = keep(weights, top_k=0, top_p=0.25, min_p=0.0)
    assert ids is not None
    assert ids.tolist() == list(range(2500))


def test_top_p_zero_keeps_one_token_and_a_sum_exactly_at_p_is_enough():
    weights = np.array([ONE // 2, ONE, ONE // 2], np.uint64)
    for top_p, kept in [(0.0, [1]), (0.5, [1]), (f32(0.50001), [0, 1]), (0.75, [0, 1])]:
        ids, _ = keep(weights, top_k=0, top_p=top_p, min_p=0.0)
        assert ids is not None
        assert ids.tolist() == kept, top_p


def test_top_p_counts_only_what_top_k_left():
    weights = np.array([ONE, ONE // 2, ONE // 2, ONE // 2], np.uint64)
    ids, _ = keep(weights, top_k=2, top_p=f32(0.6), min_p=0.0)
    assert ids is not None
    assert ids.tolist() == [0]  # 1 of 1.5; of all four it would be 1 of 2.5 and the second would stay


def test_min_p_is_a_share_of_the_greatest_weight_and_includes_equality():
    weights = np.array([ONE, ONE // 4, ONE // 4 - 1], np.uint64)
    ids, _ = keep(weights, top_k=0, top_p=1.0, min_p=0.25)
    assert ids is not None
    assert ids.tolist() == [0, 1]


def test_frequencies_of_draws_follow_the_weights():
    weights = np.array([ONE, ONE // 2, 0, ONE // 2], np.uint64)
    params = SamplingParams(seed=11)
    drawn = Counter(draw(weights, params, random_bits(params, position)) for position in range(4000))
    assert drawn[2] == 0
    for token_id, share in {0: 0.5, 1: 0.25, 3: 0.25}.items():
        assert abs(drawn[token_id] / 4000 - share) < 0.03, drawn


def test_the_draw_is_a_function_of_seed_position_and_sample_only():
    a, b = SamplingParams(seed=2**63 + 5), SamplingParams(seed=2**63 + 5, sample=1)
    assert random_bits(a, 3) == random_bits(a, 3)
    assert len({random_bits(a, 3), random_bits(a, 4), random_bits(b, 3)}) == 3
    # Pinned: a change of counter layout would silently change every answer.
    assert random_bits(SamplingParams(seed=0), 0) == 0xF08D6EAA_844515E1
    assert random_bits(SamplingParams(seed=2**63 + 5, sample=2), 7) == 0xED9B5A82_629CF307


def test_all_weights_zero_is_an_error_not_token_zero():
    with pytest.raises(ValueError, match="weight 0"):
        draw(np.zeros(5, np.uint64), SamplingParams(), 1)


# --- penalties -------------------------------------------------------------------------------


def rounded(exact: Fraction) -> Fraction:
    """Round to float32, nearest even, subnormals to zero; in integers."""
    if exact == 0:
        return exact
    exponent = math.floor(math.log2(abs(exact)))
    while Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    unit = Fraction(2) ** (max(exponent, -126) - 23)
    value = round(exact / unit) * unit
    return Fraction(0) if abs(value) < Fraction(2) ** -126 else value


amounts = st.floats(-3, 3, width=32)


@settings(max_examples=150, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    answer=st.lists(st.integers(0, 9), max_size=12),
    repetition=st.sampled_from([1.0, 1.5, f32(1.1), f32(0.7)]),
    presence=amounts,
    frequency=amounts,
    bias=st.dictionaries(st.integers(0, 9), amounts, max_size=4),
    asked=st.sets(st.integers(0, 11)),
)
def test_penalties_are_the_written_sequence_of_roundings(
    prompt, answer, repetition, presence, frequency, bias, asked
):
    params = SamplingParams(
        repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias
    )
    penalties = Penalties(params, prompt)
    for place, token_id in enumerate(answer):
        if place in asked:  # after each token, or after several
            for array in penalties.arrays():
                array += 7  # theirs who asked
        penalties.note(token_id)
    found = {i: (r, s) for i, r, s in zip(*(array.tolist() for array in penalties.arrays()), strict=True)}
    flat = {k: rounded(Fraction(v)) for k, v in {"p": presence, "f": frequency}.items()}
    for token_id in range(10):
        count = answer.count(token_id)
        amount = Fraction(0)
        if count:
            amount = rounded(rounded(flat["f"] * count) + flat["p"])
        if token_id in bias:
            amount = rounded(amount - rounded(Fraction(bias[token_id])))
        seen = token_id in prompt or token_id in answer
        expected = (repetition if seen else 1.0, float(amount))
        assert found.get(token_id, (1.0, 0.0)) == expected, token_id
    assert list(found) == sorted(found)


def test_nothing_asked_for_means_no_penalty_at_all():
    penalties = Penalties(SamplingParams(), [1, 2, 3])
    assert not penalties.is_active
    for active in (
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(presence_penalty=0.5),
        SamplingParams(frequency_penalty=-0.5),
        SamplingParams(logit_bias={4: 1.0}),
    ):
        assert Penalties(active, [1]).is_active


def test_a_prompt_token_is_repeated_but_not_present_in_the_answer():
    penalties = Penalties(
        SamplingParams(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5), [5, 5]
    )
    penalties.note(7)
    penalties.note(7)
    ids, repetition, subtract = penalties.arrays()
    assert (ids.tolist(), repetition.tolist(), subtract.tolist()) == ([5, 7], [2.0, 2.0], [0.0, 2.0])


# --- parameters --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("presence_penalty", math.inf),
        ("frequency_penalty", math.nan),
        ("sample", 2**32),
        ("logit_bias", {16: 1.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {3: math.inf}),
    ],
)
def test_a_parameter_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(BackendError) as caught:
        check_sampling(SamplingParams(**{field: value}), vocab_size=16)
    assert caught.value.error.code == "invalid-sampling"
    assert any(name.startswith(field) for name in caught.value.error.facts)


def test_all_problems_are_named_at_once():
    with pytest.raises(BackendError) as caught:
        check_sampling(SamplingParams(temperature=-1, top_p=3, logit_bias={99: 0}), vocab_size=16)
    assert list(caught.value.error.facts) == ["temperature", "top_p", "logit_bias[99]"]


def test_good_parameters_pass():
    check_sampling(SamplingParams(top_p=0, min_p=1, logit_bias={15: -100}), vocab_size=16)


def test_a_temperature_that_flushes_to_zero_is_greedy():
    assert is_greedy(SamplingParams(temperature=0))
    assert is_greedy(SamplingParams(temperature=1e-40))
    assert not is_greedy(SamplingParams(temperature=2.0**-126))


def test_a_vocabulary_of_262144_costs_milliseconds():
    words = philox_words(3, 9, 0, 2 * 262_144).astype(np.uint64).reshape(2, -1)
    weights = words[0] >> (words[1] % np.uint64(33))
    weights[777] = ONE
    params = SamplingParams(top_k=50, top_p=0.95, min_p=0.01)
    best = math.inf
    for attempt in range(10):
        start = time.perf_counter()
        draw(weights, params, attempt << 60)
        best = min(best, time.perf_counter() - start)
    assert best < 0.02, f"{best * 1e3:.2f} ms"
