"""Chunking, company, block placement and threads change no bit of a model's logits.

For lanes that promise bits. numpy promises none; what it shares with them is tested in
tests/core/test_models.py to within rounding.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.batches import Sequences
from lanes.every_lane import EXACT, make_lane
from lanes.tiny_models import BY_FAMILY, open_model, random_tensors, write_model
from mens_core.trace import TracingOps
from vox_plugin_api.families import parse_config

LENGTH = 300
"""Positions: more than two KV blocks and many sliding windows."""


@pytest.fixture(scope="module", params=EXACT)
def lane_name(request):
    make_lane(request.param, request.config)  # skips before any model is made
    return request.param


@pytest.fixture(scope="module", params=BY_FAMILY)
def model(request, lane_name, tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("model"), BY_FAMILY[request.param], seed=3)
    return open_model(path, make_lane(lane_name, request.config)).model


IDS = np.random.default_rng(21).integers(0, 97, (3, LENGTH)).tolist()


@pytest.fixture(scope="module")
def whole(model):
    """Logits of every position of each sequence, run alone and at once."""
    return [
        host(model, model.forward(Sequences().step([(0, ids)], all_logits=True), model.new_cache(3)))
        for ids in IDS
    ]


def host(model, result):
    assert result.faults == ()
    return model.ops.to_host(result.logits).copy()


@st.composite
def schedules(draw):
    """Steps; each gives some of three sequences their next few tokens, in any order."""
    left = [draw(st.integers(1, LENGTH)) for _ in range(3)]
    steps = []
    while any(left):
        chosen = draw(st.permutations([s for s in range(3) if left[s]]))
        chosen = chosen[: draw(st.integers(1, len(chosen)))]
        step = []
        for s in chosen:
            size = draw(st.one_of(st.just(1), st.integers(1, 7), st.integers(1, LENGTH)))
            size = min(size, left[s])
            if len(steps) > 40:
                size = left[s]  # enough decoding; finish
            step.append((s, size))
            left[s] -= size
        steps.append(step)
    return steps


def test_no_schedule_changes_a_bit(lane_name, model, whole):
    @settings(max_examples=25 if lane_name == "mens-cpu-ref" else 2, deadline=None, derandomize=True)
    @given(schedule=schedules())
    def run(schedule):
        sequences, cache, done = Sequences(), model.new_cache(9), [0, 0, 0]
        for step in schedule:
            rows = [(s, IDS[s][done[s] : done[s] + size]) for s, size in step]
            logits = host(model, model.forward(sequences.step(rows, all_logits=True), cache))
            begin = 0
            for s, size in step:
                expected = whole[s][done[s] : done[s] + size]
                assert logits[begin : begin + size].tobytes() == expected.tobytes(), (s, done[s], size)
                begin, done[s] = begin + size, done[s] + size

    run()


def test_which_rows_want_logits_changes_no_bit(model, whole):
    batch = Sequences().step([(0, IDS[0]), (1, IDS[1])], all_logits=True)
    wanted = np.array([0, 17, 128, LENGTH - 1, LENGTH, 2 * LENGTH - 1], np.int32)
    logits = host(model, model.forward(dataclasses.replace(batch, logit_rows=wanted), model.new_cache(6)))
    expected = np.concatenate(whole[:2])[wanted]
    assert logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("family", BY_FAMILY)
def test_lanes_with_bits_agree_on_every_operator(family, tmp_path, request):
    """The fast kernels against the scalar reference, operator by operator."""
    path = write_model(tmp_path, BY_FAMILY[family], seed=4)
    traces = {}
    for name in EXACT:
        loaded = open_model(path, make_lane(name, request.config)).model
        ops = TracingOps(loaded.ops)
        traced = dataclasses.replace(loaded, ops=ops)
        traced.forward(Sequences().step([(0, IDS[0][:200])], all_logits=True), traced.new_cache(2))
        traces[name] = ops.operators
    first, *others = traces.values()
    for other in others:
        differing = [a.name for a, b in zip(first, other, strict=True) if a != b]
        assert not differing, f"first at {differing[0]}"


@pytest.mark.parametrize("family", BY_FAMILY)
def test_a_lane_with_bits_is_within_rounding_of_the_exact_logits(lane_name, family, tmp_path, request):
    from oracle.float64_forward import settings_of
    from oracle.rounding import logit_bound

    config = BY_FAMILY[family]
    tensors = random_tensors(parse_config(config), 3)
    path = write_model(tmp_path, config, tensors)
    named = {name.removeprefix("model."): t for name, t in tensors.items()}
    head = "lm_head.weight" if "lm_head.weight" in named else "embed_tokens.weight"
    exact, bound = logit_bound(settings_of(config), named, head, IDS[0][:200])
    loaded = open_model(path, make_lane(lane_name, request.config)).model
    batch = Sequences().step([(0, IDS[0][:200])], all_logits=True)
    found = host(loaded, loaded.forward(batch, loaded.new_cache(2)))
    assert np.abs(found - exact).max() < bound
