"""POST /v1/chat/completions, over a live socket."""

from __future__ import annotations

import json

import pytest

from fixtures.scripted_service import (
    CASES,
    EOS,
    IM_END,
    ScriptedEngine,
    cases,
    drawn,
    make_service,
    model_info,
    text,
)

HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}


async def post(client, body, path="/v1/chat/completions", **headers):
    async with client.post(path, json=body, headers=headers) as response:
        return response.status, json.loads(await response.text()), response.headers


async def stream(client, body, path="/v1/chat/completions"):
    """Return the events of a stream; the last is "[DONE]" if it ended well."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        blocks = (await response.text()).split("\n\n")
    assert blocks[-1] == ""
    datas = [b.removeprefix("data: ") for b in blocks[:-1] if not b.startswith(":")]
    return [d if d == "[DONE]" else json.loads(d) for d in datas]


async def test_an_answer_has_openais_shape_and_says_what_made_it(serving):
    engine = ScriptedEngine([*text("Hi there"), IM_END])
    client = await serving(make_service(engine))
    status, body, headers = await post(client, {**HELLO, "seed": 7, "temperature": 0})
    assert status == 200
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    assert body["model"] == "m"
    [choice] = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Hi there", "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    markup = 3
    assert (
        body["usage"]["prompt_tokens"]
        == len(engine.requests[0].token_ids)
        == len(prompt.replace("<|im_start|>", "").replace("<|im_end|>", "")) + markup
    )
    assert body["usage"]["completion_tokens"] == len("Hi there") + 1
    assert body["seed"] == 7 and headers["x-vox-seed"] == "7"
    assert body["vox"]["plugin"] == headers["x-vox-plugin"] == "scripted"
    assert body["vox"]["lane"] == "cpu" and body["vox"]["numerics"] == "canonical"


async def test_a_stream_has_one_role_one_finish_one_id_and_no_usage_unasked(serving):
    client = await serving(make_service(ScriptedEngine([*text("Hi, you"), IM_END])))
    events = await stream(client, {**HELLO, "seed": 1})
    assert events[-1] == "[DONE]"
    chunks = events[:-1]
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    assert all(c["object"] == "chat.completion.chunk" and len(c["choices"]) == 1 for c in chunks)
    assert all("usage" not in c for c in chunks)
    deltas = [c["choices"][0]["delta"] for c in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in d for d in deltas[1:])
    assert "".join(d.get("content", "") for d in deltas) == "Hi, you"
    finishes = [c["choices"][0]["finish_reason"] for c in chunks]
    assert finishes == [None] * (len(chunks) - 1) + ["stop"]
    assert deltas[-1] == {}
    assert chunks[0]["seed"] == 1 and chunks[0]["vox"]["lane"] == "cpu"


async def test_usage_is_streamed_when_asked_with_empty_choices_just_before_the_end(serving):
    client = await serving(make_service(ScriptedEngine(text("abc"), finish="length")))
    events = await stream(client, {**HELLO, "stream_options": {"include_usage": True}})
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == []
    assert events[-2]["usage"]["completion_tokens"] == 3
    assert events[-2]["usage"]["total_tokens"] == events[-2]["usage"]["prompt_tokens"] + 3
    assert [e for e in events[:-2] if "usage" in e] == []


async def test_a_stream_and_a_whole_answer_say_the_same(serving):
    words = "é😀漢字 and a long tail of plain text"
    client = await serving(make_service(ScriptedEngine([*text(words), EOS])))
    _, body, _ = await post(client, {**HELLO, "stop": ["tail"]})
    events = await stream(client, {**HELLO, "stop": ["tail"]})
    streamed = "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1])
    assert streamed == body["choices"][0]["message"]["content"] == words.split("tail")[0]


async def test_max_completion_tokens_wins_over_max_tokens_and_length_is_reported(serving):
    engine = ScriptedEngine(text("abcdefgh"))
    client = await serving(make_service(engine))
    _, body, _ = await post(client, {**HELLO, "max_tokens": 7, "max_completion_tokens": 3})
    assert body["choices"][0]["message"]["content"] == "abc"
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


async def test_logprobs_have_openais_shape_and_their_texts_join_to_the_content(serving):
    client = await serving(make_service(ScriptedEngine([*text("né😀"), EOS])))
    _, body, _ = await post(client, {**HELLO, "logprobs": True, "top_logprobs": 2})
    choice = body["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == choice["message"]["content"] == "né😀"
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "né😀"
    assert [entry["logprob"] for entry in content] == [-0.5] * 7
    assert [[t["logprob"] for t in entry["top_logprobs"]] for entry in content] == [[-0.5, -1.25]] * 7
    assert choice["logprobs"]["refusal"] is None
    events = await stream(client, {**HELLO, "logprobs": True, "top_logprobs": 2})
    streamed = [
        entry
        for e in events[:-1]
        for entry in (e["choices"][0].get("logprobs") or {"content": []})["content"]
    ]
    assert streamed == content


async def test_logprobs_absent_when_not_asked_and_top_logprobs_alone_is_refused(serving):
    client = await serving(make_service())
    status, body, _ = await post(client, {**HELLO, "top_logprobs": 2})
    assert status == 400 and body["error"]["param"] == "top_logprobs"
    status, body, _ = await post(client, HELLO)
    assert body["choices"][0]["logprobs"] is None


async def test_a_base_model_without_template_says_so_and_names_the_way_out(serving):
    client = await serving(make_service(template=None))
    status, body, _ = await post(client, HELLO)
    assert status == 400
    assert body["error"]["code"] == "no-chat-template"
    assert "/v1/completions" in body["error"]["message"]


async def test_a_worker_that_dies_in_mid_stream_is_a_typed_event_and_ends_the_stream(serving):
    engine = ScriptedEngine(text("abcdef"), fail_after=3)
    client = await serving(make_service(engine))
    events = await stream(client, HELLO)
    assert events[-1]["error"]["code"] == "worker-died"
    assert set(events[-1]["error"]) >= {"message", "type", "param", "code"}
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == "abc"
    status, body, headers = await post(client, HELLO)
    assert (status, body["error"]["code"], headers["retry-after"]) == (503, "worker-died", "1")


async def test_a_failure_before_the_first_token_is_an_ordinary_error_even_when_streaming(serving):
    client = await serving(make_service(ScriptedEngine(text("abc"), fail_after=0)))
    status, body, _ = await post(client, {**HELLO, "stream": True})
    assert (status, body["error"]["code"]) == (503, "worker-died")


# --- cases -----------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("api", "A1"), ids=lambda c: c["file"])
async def test_a1_our_own_assistant_turn_is_accepted_back(serving, case):
    engine = ScriptedEngine(text("ok"))
    client = await serving(make_service(engine))
    request = json.loads((CASES / case["file"]).read_text())
    status, body, _ = await post(client, request)
    if case["expect"]["kind"] == "error":
        assert status == case["expect"]["status"]
        assert body["error"]["param"] in case["expect"]["must_mention"]
        return
    assert status == 200
    reference = json.loads((CASES / "hand/api/A1_null.json").read_text())
    await post(client, reference)
    assert engine.requests[0].token_ids == engine.requests[1].token_ids
    prompt = bytes(t for t in engine.requests[0].token_ids if t < 256).decode()
    assert 'get_weather {"city": "Paris"}' in prompt
    assert any("tools" in warning for warning in body["vox"]["warnings"])


@pytest.mark.parametrize("case", cases("api", "A5"), ids=lambda c: c["file"])
@pytest.mark.parametrize("temperature", [0, 0.8])
async def test_a5_n_choices_are_served_and_best_of_is_refused(serving, case, temperature):
    engine = ScriptedEngine(drawn)
    client = await serving(make_service(engine))
    request = json.loads((CASES / case["file"]).read_text())
    if case["expect"]["kind"] == "error":
        status, body, _ = await post(client, request, "/v1/completions")
        assert (status, body["error"]["param"]) == (case["expect"]["status"], "best_of")
        status, body, _ = await post(client, {"prompt": "hello", "suffix": "x"}, "/v1/completions")
        assert (status, body["error"]["param"]) == (400, "suffix")
        return
    request["temperature"] = temperature
    status, body, _ = await post(client, request)
    assert status == 200
    texts = [choice["message"]["content"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert len(set(texts)) == (1 if temperature == 0 else 3)
    assert body["usage"]["completion_tokens"] == 3 * 8
    _, again, _ = await post(client, request)
    assert [choice["message"]["content"] for choice in again["choices"]] == texts
    events = await stream(client, {**request, "stream_options": {"include_usage": True}})
    chunks = [e for e in events[:-1] if e["choices"]]
    for index in range(3):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert "".join(c["delta"].get("content", "") for c in own) == texts[index]
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
        assert [c["delta"]["role"] for c in own if "role" in c["delta"]] == ["assistant"]
    assert events[-2]["usage"]["completion_tokens"] == 24


async def test_d5_seeds_are_honoured_drawn_when_absent_and_always_echoed(serving):
    plan = json.loads((CASES / "hand/determinism/D5_plan.json").read_text())
    client = await serving(make_service(ScriptedEngine(drawn)))

    async def ask(**options):
        body = {
            "prompt": plan["prompt"],
            "temperature": plan["temperature"],
            "max_tokens": plan["max_tokens"],
        }
        status, answer, _ = await post(client, {**body, **options}, "/v1/completions")
        assert status == 200
        return answer["choices"][0]["text"], answer["seed"]

    for arm in plan["arms"]:
        seeds = arm.get("seeds") or [arm["seed"]] * arm["times"]
        answers = [await ask(seed=seed) for seed in seeds]
        distinct = len({answer for answer, _ in answers})
        assert distinct == arm.get("distinct", distinct)
        assert distinct >= arm.get("distinct_min", 1)
        for seed, (answer, echoed) in zip(seeds, answers, strict=True):
            assert echoed == seed if seed is not None else isinstance(echoed, int)
            assert (await ask(seed=echoed))[0] == answer


async def test_context_overflow_is_a_400_with_both_numbers(serving):
    client = await serving(make_service(info=model_info(context_length=64)))
    status, body, _ = await post(client, {"messages": [{"role": "user", "content": "x" * 200}]})
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"
    assert body["error"]["param"] == "messages"
    assert "64" in body["error"]["message"]
    assert body["error"]["facts"]["context_length"] == 64
    assert body["error"]["facts"]["prompt_tokens"] > 200


async def test_max_tokens_beyond_the_context_ends_with_length_and_not_beyond_it(serving):
    engine = ScriptedEngine(text("y" * 100))
    client = await serving(make_service(engine, info=model_info(context_length=64)))
    _, body, _ = await post(client, {**HELLO, "max_tokens": 10_000})
    prompt = len(engine.requests[0].token_ids)
    assert engine.requests[0].max_tokens == 64 - prompt
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["total_tokens"] == 64
