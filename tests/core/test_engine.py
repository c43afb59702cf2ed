"""The engine: what a request gets never depends on who else is served."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lanes.toy_model import VOCAB, ToyLane, ToyModel
from mens_core.engine import Engine
from mens_core.scheduler import StepLimits
from mens_core.sequence import BACKLOG, SequenceRequest
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import GenerateResult, SamplingParams

CASES = Path(__file__).parents[1] / "cases"
INDEX = json.loads((CASES / "INDEX.json").read_text())


def plan(case_id: str) -> dict:
    (case,) = [case for case in INDEX if case["id"] == case_id]
    return json.loads((CASES / case["file"]).read_text())


def an_engine(blocks=16, context_length=1024, max_sequences=64, model=None, **limits) -> Engine:
    model = model or ToyModel(ToyLane())
    return Engine(
        model,
        model.new_cache(blocks),
        vocab_size=VOCAB,
        context_length=context_length,
        blocks=blocks,
        max_sequences=max_sequences,
        limits=StepLimits(**limits),
    )


def ask(token_ids, max_tokens=8, **wishes) -> SequenceRequest:
    return SequenceRequest(token_ids=tuple(token_ids), max_tokens=max_tokens, **wishes)


def text(words: str) -> list[int]:
    return [byte % VOCAB for byte in words.encode()]


def collect(sequence) -> None:
    """Do what a consumer does: take the tokens, so that the sequence goes on."""
    taken = getattr(sequence, "taken", [])
    while sequence.ready:
        taken.append(sequence.ready.popleft())
    sequence.taken = taken


def finish(engine, *sequences):
    while not all(sequence.is_done for sequence in sequences):
        for sequence in sequences:
            collect(sequence)
        assert engine.step() > 0
    for sequence in sequences:
        collect(sequence)


def outcome(sequence) -> bytes:
    """All that a caller could compare, bit by bit."""
    collect(sequence)
    result = GenerateResult(
        tokens=sequence.taken,
        prompt=sequence.prompt_scores,
        finish_reason=sequence.finish_reason,
        stop_token_id=sequence.stop_token_id,
        generated_tokens=sequence.generated,
    )
    return result.model_dump_json().encode() + sequence.digest.digest()


def alone(request, **engine) -> bytes:
    one = an_engine(**engine)
    sequence = one.submit(request)
    finish(one, sequence)
    assert (one.pool.used, one.pool.reserved, one.running) == (0, 0, 0)
    return outcome(sequence)


# --- the promise -----------------------------------------------------------------------------

requests = st.builds(
    ask,
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=300),
    st.integers(0, 12),
    sampling=st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 5]),
        top_p=st.sampled_from([1.0, 0.9]),
        repetition_penalty=st.sampled_from([1.0, 1.3]),
        frequency_penalty=st.sampled_from([0.0, 0.5]),
        seed=st.integers(0, 2**64 - 1),
    ),
    stop_token_ids=st.sampled_from([frozenset(), frozenset({3, 11, 19, 27, 35})]),
    logprobs=st.sampled_from([None, 0, 3]),
    prompt_logprobs=st.sampled_from([None, None, 2]),
    logits_digest=st.sampled_from([False, False, True]),
)


@settings(max_examples=100, deadline=None)
@given(
    crowd=st.lists(st.tuples(st.integers(0, 6), requests), min_size=1, max_size=6),
    rows=st.sampled_from([1, 7, 64, 256]),
    scored_rows=st.sampled_from([1, 5, 32]),
    blocks=st.sampled_from([3, 6, 40]),
    max_sequences=st.sampled_from([1, 3, 64]),
)
def test_bytes_depend_on_the_request_alone(crowd, rows, scored_rows, blocks, max_sequences):
    engine = an_engine(
        blocks=blocks, max_sequences=max_sequences, rows=rows, scored_rows=scored_rows, least_prefill_rows=1
    )
    arrivals = sorted(crowd, key=lambda pair: pair[0])
    sequences = []
    turn = 0
    while len(sequences) < len(arrivals) or not all(s.is_done for s in sequences):
        while len(sequences) < len(arrivals) and arrivals[len(sequences)][0] <= turn:
            sequences.append(engine.submit(arrivals[len(sequences)][1]))
        engine.step()
        for sequence in sequences:
            collect(sequence)
        turn += 1
    for (_, request), sequence in zip(arrivals, sequences, strict=True):
        assert outcome(sequence) == alone(request)
    assert (engine.pool.used, engine.pool.reserved) == (0, 0)


@pytest.mark.parametrize("case_id", ["D1"])
def test_companions_arrivals_and_history_change_no_byte(case_id):
    case = plan(case_id)
    greedy = SamplingParams(temperature=case["temperature"])
    request = ask(text(case["prompt"]), case["max_tokens"], sampling=greedy, logprobs=2)
    digests = set()
    for companions in case["companions"]:
        for arrival in case["arrival"]:
            for warmups in case["warmups"]:
                engine = an_engine(blocks=64)
                for i in range(warmups):
                    finish(engine, engine.submit(ask(text(f"warm up {i}"), 3, sampling=greedy)))
                prompts = [text(case["companion_prompts"][i % 3]) for i in range(companions)]
                others = [ask(prompt, 20, sampling=greedy) for prompt in prompts]
                running = [engine.submit(other) for other in others] if arrival == "before" else []
                if running:
                    engine.step()
                asked = engine.submit(request)
                if arrival == "mid":
                    for _ in range(5):
                        engine.step()
                if arrival != "before":
                    running += [engine.submit(other) for other in others]
                finish(engine, asked, *running)
                digests.add(hashlib.sha256(outcome(asked)).hexdigest())
    assert len(digests) == 1


@pytest.mark.parametrize("scale", [1, 8], ids=["block-16-as-given", "our-blocks-of-128"])
def test_repeats_and_chunks_around_block_edges_change_no_byte(scale):
    case = plan("D4")
    assert case["block"] * 8 == 128
    greedy = SamplingParams(temperature=case["temperature"])
    for length in case["lengths"]:
        blocks, rest = divmod(length, case["block"])
        if rest > case["block"] // 2:
            blocks, rest = blocks + 1, rest - case["block"]
        prompt = text("all work and no play " * 40)[: case["block"] * scale * blocks + rest]
        request = ask(prompt, case["max_tokens"], sampling=greedy, logprobs=0)
        digests = set()
        for chunk in case["chunk"]:
            engine = an_engine(rows=chunk, least_prefill_rows=1)
            for _ in range(case["repeats"]):
                sequence = engine.submit(request)
                finish(engine, sequence)
                digests.add(outcome(sequence))
        assert len(digests) == 1, length


def test_a_seed_decides_the_answer_and_different_seeds_differ():
    case = plan("D5")
    host = np.random.default_rng(20261130)
    for arm in case["arms"]:
        seeds = arm["seeds"] if "seeds" in arm else [arm["seed"]] * arm["times"]
        drawn = [
            int(host.integers(2**63)) if seed is None else seed for seed in seeds
        ]  # as the host draws one
        answers = set()
        for seed in drawn:
            sampling = SamplingParams(temperature=case["temperature"], seed=seed)
            answers.add(alone(ask(text(case["prompt"]), case["max_tokens"], sampling=sampling)))
        assert len(answers) >= arm.get("distinct_min", 1), arm
        assert len(answers) <= arm.get("distinct", len(seeds)), arm


def test_samples_of_one_seed_differ_and_each_is_repeatable():
    answers = [
        alone(ask(text("one"), 12, sampling=SamplingParams(temperature=1.5, seed=4, sample=sample)))
        for sample in (0, 1, 2, 1)
    ]
    assert len(set(answers)) == 3
    assert answers[1] == answers[3]


# --- batching --------------------------------------------------------------------------------


def test_a_step_runs_the_model_once_for_everyone():
    model = ToyModel(ToyLane())
    engine = an_engine(model=model, rows=64)
    first = engine.submit(ask(text("one two"), 6))
    engine.step()
    second = engine.submit(ask(text("a longer prompt " * 6), 4))
    finish(engine, first, second)
    assert model.steps == [
        [(0, 7)],
        [(7, 1), (0, 63)],
        [(8, 1), (63, 33)],
        [(9, 1), (96, 1)],
        [(10, 1), (97, 1)],
        [(11, 1), (98, 1)],
    ]


def test_the_last_token_of_an_answer_is_never_fed():
    model = ToyModel(ToyLane())
    engine = an_engine(model=model)
    finish(engine, engine.submit(ask([1, 2, 3], 1)))
    assert model.steps == [[(0, 3)]]


# --- admission -------------------------------------------------------------------------------


def test_who_does_not_fit_waits_and_nobody_passes():
    engine = an_engine(blocks=4, rows=16)
    first = engine.submit(ask([1] * 300, 20))  # 3 blocks
    second = engine.submit(ask([2] * 200, 20))  # 2 blocks: waits
    third = engine.submit(ask([3], 5))  # would fit now, but is third
    engine.step()
    assert (engine.running, engine.waiting) == (1, 2)
    finish(engine, first)
    engine.step()
    assert (engine.running, engine.waiting) == (2, 0)
    finish(engine, second, third)
    assert third.generated == 5


def test_no_more_sequences_run_than_allowed():
    engine = an_engine(max_sequences=2)
    sequences = [engine.submit(ask([i], 3)) for i in range(5)]
    while not all(s.is_done for s in sequences):
        engine.step()
        assert engine.running <= 2
    assert [s.generated for s in sequences] == [3] * 5


def test_a_request_beyond_the_context_is_refused_with_numbers_before_anything_starts():
    engine = an_engine(context_length=100)
    with pytest.raises(BackendError) as caught:
        engine.submit(ask([1] * 90, 11))
    assert caught.value.error.code == "context-overflow"
    assert caught.value.error.facts == {
        "prompt_tokens": 90,
        "max_tokens": 11,
        "requested": 101,
        "context_length": 100,
    }
    assert (engine.waiting, engine.step()) == (0, 0)
    finish(engine, engine.submit(ask([1] * 90, 10)))


def test_a_request_that_could_never_fit_is_refused_not_queued():
    engine = an_engine(blocks=2, context_length=1024)
    with pytest.raises(BackendError) as caught:
        engine.submit(ask([1] * 250, 8))
    assert caught.value.error.code == "kv-cache-too-small"
    assert caught.value.error.facts == {"needed_blocks": 3, "total_blocks": 2, "positions": 257}
    finish(engine, engine.submit(ask([1] * 250, 7)))  # 256 positions are written, and they fit


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**40])
def test_a_token_outside_the_vocabulary_is_refused(token_id):
    with pytest.raises(BackendError) as caught:
        an_engine().submit(ask([1, token_id]))
    assert caught.value.error.code == "invalid-token"
    assert caught.value.error.facts["position"] == 1


# --- endings ---------------------------------------------------------------------------------


def test_a_stop_token_ends_the_answer_and_is_not_part_of_it():
    plain = an_engine()
    free = plain.submit(ask(text("hello"), 10))
    finish(plain, free)
    answer = [token.token_id for token in free.taken]
    length = max(i for i in range(10) if answer[i] not in answer[:i])
    assert length > 2
    stop = answer[length]
    engine = an_engine()
    stopped = engine.submit(ask(text("hello"), 10, stop_token_ids=frozenset({stop})))
    finish(engine, stopped)
    assert [token.token_id for token in stopped.taken] == answer[:length]
    assert (stopped.finish_reason, stopped.stop_token_id, stopped.generated) == ("stop", stop, length + 1)
    assert engine.pool.reserved == 0


def test_a_stop_token_as_the_last_allowed_one_is_still_a_stop():
    plain = an_engine()
    free = plain.submit(ask(text("hello"), 1))
    finish(plain, free)
    stop = free.taken[0].token_id
    engine = an_engine()
    stopped = engine.submit(ask(text("hello"), 1, stop_token_ids=frozenset({stop})))
    finish(engine, stopped)
    assert (stopped.finish_reason, stopped.taken) == ("stop", [])


def test_scoring_alone_gives_every_prompt_token_its_logprob():
    prompt = text("score this please")
    engine = an_engine(scored_rows=5)
    sequence = engine.submit(ask(prompt, 0, prompt_logprobs=1))
    finish(engine, sequence)
    assert (sequence.finish_reason, sequence.generated) == ("length", 0)
    assert [token.token_id for token in sequence.prompt_scores] == prompt[1:]
    assert all(token.logprob < 0 and len(token.top) == 1 for token in sequence.prompt_scores)


def test_a_prompt_scored_is_what_drawing_those_tokens_would_have_scored():
    engine = an_engine()
    answer = engine.submit(ask(text("draw"), 9, sampling=SamplingParams(temperature=1.2, seed=8), logprobs=2))
    finish(engine, answer)
    scored = engine.submit(ask(answer.tokens, 0, prompt_logprobs=2))
    finish(engine, scored)
    assert scored.prompt_scores[3:] == answer.taken


def test_logprobs_ignore_temperature_penalties_and_bias():
    engine = an_engine()
    sampling = SamplingParams(temperature=0, logit_bias={17: 1000.0}, repetition_penalty=1.7)
    biased = engine.submit(ask(text("bias"), 4, sampling=sampling, logprobs=3))
    finish(engine, biased)
    assert [token.token_id for token in biased.taken] == [17] * 4
    scored = engine.submit(ask(biased.tokens, 0, prompt_logprobs=3))
    finish(engine, scored)
    assert scored.prompt_scores[3:] == biased.taken


def test_penalties_follow_the_answer_as_it_grows():
    engine = an_engine()
    never_twice = SamplingParams(temperature=0, presence_penalty=1000.0)
    answer = engine.submit(ask([5, 6], 40, sampling=never_twice))
    plain = engine.submit(ask([5, 6], 40, sampling=SamplingParams(temperature=0)))
    finish(engine, answer, plain)
    assert len(set(answer.tokens[2:])) == 40
    assert len(set(plain.tokens[2:])) < 40
    assert answer.tokens[2] == plain.tokens[2]


def test_the_digest_covers_the_logits_of_every_position():
    prompt = text("every position")
    whole, shorter = (
        alone(ask(prompt, 0, logits_digest=True))[-32:],
        alone(ask(prompt[:-1], 0, logits_digest=True))[-32:],
    )
    lane = ToyLane()
    model = ToyModel(lane)
    engine = an_engine(model=model)
    rows = []
    forward = model.forward

    def recording(batch, cache, wishes=()):
        result = forward(batch, cache, wishes)
        rows.append(np.array(result.logits))
        return result

    model.forward = recording
    finish(engine, engine.submit(ask(prompt, 0, logits_digest=True)))
    logits = np.concatenate(rows)
    assert logits.shape == (len(prompt), VOCAB)
    assert whole == hashlib.sha256(logits.astype("<f4").tobytes()).digest()
    assert shorter == hashlib.sha256(logits[:-1].astype("<f4").tobytes()).digest()


# --- when things go wrong --------------------------------------------------------------------


def test_a_value_that_is_not_finite_fails_only_its_own_sequence():
    model = ToyModel(ToyLane(), poison=47)
    engine = an_engine(model=model, blocks=8)
    good_request = ask([1, 2, 3], 12)
    good = engine.submit(good_request)
    bad = engine.submit(ask([5, 47, 6], 12))
    finish(engine, good, bad)
    assert bad.failure is not None
    assert bad.failure.error.code == "non-finite"
    assert bad.failure.error.facts == {"operator": "embed", "position": 1, "generated_tokens": 0}
    assert good.failure is None
    assert outcome(good) == alone(good_request)
    # The spoiled blocks serve the next one without a trace.
    again = engine.submit(good_request)
    finish(engine, again)
    assert outcome(again) == alone(good_request)


def test_a_penalty_that_overflows_fails_only_its_own_sequence():
    engine = an_engine()
    wild = SamplingParams(temperature=0, repetition_penalty=1.2e-38)
    good = engine.submit(ask([1, 2, 3], 12))
    bad = engine.submit(ask(text("abcdefgh"), 12, sampling=wild))
    finish(engine, good, bad)
    assert bad.failure is not None
    assert (bad.failure.error.code, bad.failure.error.facts["operator"]) == ("non-finite", "penalise")
    assert outcome(good) == alone(ask([1, 2, 3], 12))


def test_a_lane_that_raises_fails_the_sequences_of_the_step_and_the_engine_goes_on():
    model = ToyModel(ToyLane(), break_on=46)
    engine = an_engine(model=model, max_sequences=2)
    broken = [engine.submit(ask([1, 46], 5)), engine.submit(ask([2], 5))]
    waiting = engine.submit(ask([3], 5))
    with pytest.raises(MemoryError, match="ran out"):
        engine.step()
    for sequence in broken:
        assert sequence.failure is not None
        assert sequence.failure.error.code == "step-failed"
        assert "MemoryError" in sequence.failure.error.facts["exception"]
    assert engine.pool.reserved == 0
    model.break_on = None
    finish(engine, waiting)
    assert outcome(waiting) == alone(ask([3], 5))


def test_a_lane_without_room_fails_the_longest_of_the_step_and_nobody_else():
    engine = an_engine()
    good = engine.submit(ask([2], 5))
    large = engine.submit(ask([1, 46, 4], 5))
    forward = engine._model.forward

    def without_room(batch, cache, wishes=()):
        if len(batch.positions) > 2:
            raise BackendError("out-of-device-memory", "no room", facts={"free_bytes": 0}, remedy="less")
        return forward(batch, cache, wishes)

    engine._model.forward = without_room
    finish(engine, good, large)
    assert large.failure is not None
    assert (large.failure.error.code, large.failure.error.remedy) == ("out-of-device-memory", "less")
    assert outcome(good) == alone(ask([2], 5))
    assert engine.pool.reserved == 0


def test_cancelling_frees_the_blocks_at_once_and_moves_nobody_else():
    engine = an_engine(blocks=4)
    leaver = engine.submit(ask([1] * 300, 20))
    stayer = engine.submit(ask([2] * 100, 20))
    waiter = engine.submit(ask([3] * 300, 20))
    engine.step()
    engine.step()
    engine.cancel(leaver)
    assert engine.pool.reserved == 1
    engine.cancel(leaver)  # a second time does nothing
    engine.step()
    assert engine.waiting == 0
    engine.cancel(waiter)
    finish(engine, stayer)
    assert outcome(stayer) == alone(ask([2] * 100, 20))
    assert engine.pool.reserved == 0


def test_cancelling_who_waits_takes_it_out_of_the_queue():
    engine = an_engine(max_sequences=1)
    first, second = engine.submit(ask([1], 9)), engine.submit(ask([2], 9))
    engine.cancel(second)
    assert engine.waiting == 1
    finish(engine, first)
    assert (engine.waiting, engine.step()) == (0, 0)


def test_a_consumer_that_is_behind_stops_its_own_sequence_only():
    engine = an_engine()
    slow, quick = engine.submit(ask([1], 40)), engine.submit(ask([2], 40))
    while not quick.is_done:
        collect(quick)
        assert engine.step()
    assert len(slow.ready) == BACKLOG
    assert engine.step() == 0
    finish(engine, slow)
    assert outcome(slow) == alone(ask([1], 40))
