"""`usage`: what a prompt cost, and what of it was computed before."""

from __future__ import annotations

import pytest

from fixtures.scripted_service import IM_END, ScriptedEngine, drawn, make_service, text
from vox_host.app.engine import _cached_tokens
from vox_host.app.service import AnswerEnd
from vox_host.app.usage import cached_of_prompt, usage

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def end(cached: int | None) -> AnswerEnd:
    return AnswerEnd("stop", 300, 4, None, cached)


def test_details_are_there_where_the_worker_told_of_every_prompt():
    assert usage(300, 4, [128])["prompt_tokens_details"] == {"cached_tokens": 128}
    assert usage(600, 4, [128, 256])["prompt_tokens_details"] == {"cached_tokens": 384}
    assert "prompt_tokens_details" not in usage(600, 4, [128, None])
    assert usage(300, 4, [None]) == {"prompt_tokens": 300, "completion_tokens": 4, "total_tokens": 304}


def test_of_several_choices_the_one_that_computed_most_counts():
    assert cached_of_prompt([end(256), end(0), end(128)]) == 0
    assert cached_of_prompt([end(256)]) == 256
    assert cached_of_prompt([end(256), end(None)]) is None
    assert cached_of_prompt([]) is None


@pytest.mark.parametrize("observation", [None, {}, {"cached_tokens": -1}, {"cached_tokens": 301},
                                         {"cached_tokens": True}, {"cached_tokens": "128"},
                                         {"cached_tokens": 1.0}])  # fmt: skip
def test_what_no_worker_can_have_observed_is_not_passed_on(observation):
    assert _cached_tokens(observation, 300) is None
    assert _cached_tokens({"cached_tokens": 300}, 300) == 300
    assert _cached_tokens({"cached_tokens": 0}, 300) == 0


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/generate"])
async def test_every_answer_says_what_was_not_computed_again(path, serving):
    engine = ScriptedEngine([*text("Hi"), IM_END], cached=lambda params: len(params.token_ids) - 1)
    client = await serving(make_service(engine))
    async with client.post(path, json=HELLO if "chat" in path else {"prompt": "hello"}) as response:
        counts = (await response.json())["usage"]
    assert counts["prompt_tokens_details"] == {"cached_tokens": counts["prompt_tokens"] - 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_stream_says_it_with_its_usage_and_an_older_worker_has_none(path, serving):
    body = HELLO if "chat" in path else {"prompt": "hello"}
    for cached, details in ((lambda params: 2, {"cached_tokens": 2}), (None, None)):
        client = await serving(make_service(ScriptedEngine([*text("Hi"), IM_END], cached=cached)))
        asked = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with client.post(path, json=asked) as response:
            said = await response.text()
        assert ('"prompt_tokens_details"' in said) == (details is not None)
        assert ('"cached_tokens":2' in said.replace(" ", "")) == (details is not None)


async def test_choices_of_one_prompt_and_several_prompts_are_counted_once_each(serving):
    engine = ScriptedEngine(drawn, cached=lambda params: 3 * params.sampling.sample)
    client = await serving(make_service(engine))
    asked = {"prompt": ["abcdefgh", "ijklmnop"], "n": 2, "max_tokens": 2, "temperature": 1}
    async with client.post("/v1/completions", json=asked) as response:
        assert (await response.json())["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_who_stops_at_a_text_is_told_too(serving):
    engine = ScriptedEngine(text("Hello, world"), cached=lambda params: 1)
    client = await serving(make_service(engine))
    async with client.post("/v1/completions", json={"prompt": "a", "stop": ", "}) as response:
        body = await response.json()
    assert body["choices"][0]["text"] == "Hello"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
