"""What a step holds: decode rows first, prompts in order, within the limits."""

from __future__ import annotations

from mens_core.scheduler import StepLimits, plan_step
from mens_core.sequence import BACKLOG, Sequence, SequenceRequest
from vox_plugin_api.messages import GeneratedToken


def a_sequence(prompt: int, cached: int = 0, **wishes) -> Sequence:
    sequence = Sequence(SequenceRequest(token_ids=tuple(range(prompt)), **{"max_tokens": 4, **wishes}))
    sequence.cached = cached
    if cached >= prompt:
        sequence.tokens += [0] * (cached + 1 - prompt)
    return sequence


def shape(slices):
    return [(piece.start, piece.count) for piece in slices]


def test_answers_in_progress_go_before_prompts_that_arrived_earlier():
    prompt, answer = a_sequence(300), a_sequence(5, cached=7)
    assert shape(plan_step([prompt, answer], StepLimits(rows=100))) == [(7, 1), (0, 99)]


def test_prompts_share_what_is_left_in_their_order():
    first, second, third = a_sequence(60, cached=50), a_sequence(40), a_sequence(40)
    assert shape(plan_step([first, second, third], StepLimits(rows=64))) == [(50, 10), (0, 40), (0, 14)]


def test_many_answers_cannot_starve_a_prompt():
    answers = [a_sequence(1, cached=3) for _ in range(20)]
    slices = plan_step([*answers, a_sequence(100)], StepLimits(rows=20, least_prefill_rows=16))
    assert shape(slices)[20:] == [(0, 16)]


def test_rows_with_wanted_logits_are_few_per_step():
    scored, other = a_sequence(200, prompt_logprobs=0), a_sequence(50)
    limits = StepLimits(rows=256, scored_rows=32)
    assert shape(plan_step([scored, other], limits)) == [(0, 32), (0, 50)]
    assert shape(plan_step([scored, a_sequence(9, logits_digest=True)], limits)) == [(0, 32)]


def test_who_is_done_or_whose_consumer_is_behind_sits_out():
    done, behind = a_sequence(5, cached=5), a_sequence(5, cached=5)
    done.finish_reason = "length"
    behind.ready.extend([GeneratedToken(token_id=0)] * BACKLOG)
    assert plan_step([done, behind], StepLimits()) == []
    behind.ready.popleft()
    assert shape(plan_step([done, behind], StepLimits())) == [(5, 1)]
