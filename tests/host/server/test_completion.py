"""POST /v1/completions and /generate, over a live socket."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math

import pytest

from fixtures.scripted_service import (
    BOS,
    CASES,
    EOS,
    ScriptedEngine,
    byte_tokenizer,
    cases,
    drawn,
    make_service,
    model_info,
    text,
)

COMPLETIONS = "/v1/completions"


async def post(client, body, path=COMPLETIONS):
    async with client.post(path, json=body) as response:
        return response.status, json.loads(await response.text(), parse_constant=pytest.fail)


async def stream(client, body, path=COMPLETIONS):
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        blocks = (await response.text()).split("\n\n")[:-1]
    datas = [b.removeprefix("data: ") for b in blocks if not b.startswith(":")]
    assert datas[-1] == "[DONE]"
    return [json.loads(d, parse_constant=pytest.fail) for d in datas[:-1]]


async def test_a_completion_has_openais_shape(serving):
    client = await serving(make_service(ScriptedEngine([*text("Hi"), EOS])))
    status, body = await post(client, {"model": "m", "prompt": "x", "seed": 3})
    assert status == 200
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    [choice] = body["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("Hi", "stop", None)
    assert choice["token_ids"] == text("Hi")
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert body["seed"] == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[BOS, 97, 98]]),
        ("<s>ab", [[BOS, 97, 98]]),
        (["a", "b"], [[BOS, 97], [BOS, 98]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        (["a", [98]], [[BOS, 97], [98]]),
    ],
    ids=str,
)
async def test_prompts_are_text_lists_token_ids_and_batches(serving, prompt, expected):
    engine = ScriptedEngine(text("k"))
    client = await serving(make_service(engine))
    status, body = await post(client, {"prompt": prompt, "n": 2, "max_tokens": 1})
    assert status == 200
    asked = sorted((r.token_ids, r.sampling.sample) for r in engine.requests)
    assert asked == sorted((ids, sample) for ids in expected for sample in (0, 1))
    assert [c["index"] for c in body["choices"]] == list(range(2 * len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_what_an_evaluation_harness_sends_is_scored(serving):
    """Token-id batches with echo, logprobs and one new token: how log-likelihoods are asked for."""
    # The model would end the text at once; a score's length must not depend on that.
    engine = ScriptedEngine([EOS], logprobs=(-0.25, -2.0))
    client = await serving(make_service(engine))
    prompts = [[BOS, *text("the cat")], [BOS, *text("né")]]
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "seed": 1234}
    status, answer = await post(client, body)
    assert status == 200
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(prompt) + 1
        assert logprobs["token_logprobs"] == [None] + [-0.25] * len(prompt)
        assert logprobs["top_logprobs"][0] is None
        for token, top in zip(logprobs["tokens"][1:], logprobs["top_logprobs"][1:], strict=True):
            assert max(top, key=top.get) == token
    assert answer["choices"][0]["text"] == "the cat"
    assert answer["choices"][0]["logprobs"]["text_offset"] == [0, *range(7), 7]
    assert answer["choices"][1]["logprobs"]["tokens"][2:4] == ["bytes:\\xc3", "bytes:\\xa9"]


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_gives_the_prompt_back_before_the_answer(serving, max_tokens):
    client = await serving(make_service(ScriptedEngine(text("!"))))
    body = {"prompt": "né😀", "echo": True, "max_tokens": max_tokens}
    _, answer = await post(client, body)
    assert answer["choices"][0]["text"] == "né😀" + "!" * max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    events = await stream(client, body)
    assert "".join(e["choices"][0]["text"] for e in events) == answer["choices"][0]["text"]


async def test_streamed_logprobs_equal_the_whole_answers(serving):
    client = await serving(make_service(ScriptedEngine([*text("né😀 end"), EOS])))
    body = {"prompt": "ab", "echo": True, "logprobs": 2, "max_tokens": 30, "stop": "nd"}
    _, answer = await post(client, body)
    whole = answer["choices"][0]["logprobs"]
    parts = [e["choices"][0]["logprobs"] for e in await stream(client, body)]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts if part for value in part[key]] == whole[key]
    assert answer["choices"][0]["text"] == "abné😀 e"


async def test_a_stream_ends_with_one_finish_and_usage_only_when_asked(serving):
    client = await serving(make_service(ScriptedEngine(drawn)))
    events = await stream(client, {"prompt": ["a", "b"], "n": 2, "max_tokens": 4, "seed": 5})
    finishes = [(c["index"], c["finish_reason"]) for e in events for c in e["choices"] if c["finish_reason"]]
    assert sorted(finishes) == [(i, "length") for i in range(4)]
    assert all("usage" not in e for e in events)
    events = await stream(client, {"prompt": "a", "max_tokens": 4, "stream_options": {"include_usage": True}})
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("streamed", [False, True])
async def test_generate_replies_with_code_and_valid(serving, streamed):
    client = await serving(make_service(ScriptedEngine([*text("fn main() {}"), EOS])))
    for path in ("/generate", "/v1/generate"):
        if streamed:
            events = await stream(client, {"prompt": "x"}, path)
            reply = events[-1]
            assert "".join(e["text"] for e in events) == "fn main() {}"
        else:
            _, reply = await post(client, {"prompt": "x"}, path)
        assert (reply["code"], reply["valid"], reply["finish_reason"]) == ("fn main() {}", True, "stop")
        assert isinstance(reply["seed"], int) and reply["vox"]["plugin"] == "scripted"
    _, reply = await post(client, {"prompt": "x", "max_tokens": 2}, "/generate")
    assert (reply["code"], reply["valid"], reply["finish_reason"]) == ("fn", False, "length")


async def test_sampling_options_reach_the_worker_as_given_and_nothing_is_hard_coded(serving):
    engine = ScriptedEngine(text("x"))
    client = await serving(make_service(engine))
    asked = {
        "temperature": 0.25, "top_k": 7, "top_p": 0.5, "min_p": 0.125, "repetition_penalty": 1.5,
        "presence_penalty": -1.0, "frequency_penalty": 0.5, "seed": 2**63, "logit_bias": {"97": -100},
    }  # fmt: skip
    for path in (COMPLETIONS, "/generate"):
        status, _ = await post(client, {"prompt": "x", **asked}, path)
        assert status == 200
        sampling = engine.requests[-1].sampling
        assert {key: getattr(sampling, key) for key in asked} == {**asked, "logit_bias": {97: -100.0}}
    await post(client, {"prompt": "x"})
    default = engine.requests[-1].sampling
    assert (default.temperature, default.top_k, default.top_p, default.min_p) == (1.0, 0, 1.0, 0.0)


async def test_negative_seeds_are_seeds_of_their_own(serving):
    engine = ScriptedEngine(text("x"))
    client = await serving(make_service(engine))
    _, body = await post(client, {"prompt": "x", "seed": -1})
    assert body["seed"] == -1
    assert engine.requests[-1].sampling.seed == 2**64 - 1


async def test_temperature_zero_draws_no_seed_so_equal_requests_give_equal_bytes(serving):
    client = await serving(make_service(ScriptedEngine(drawn)))
    bodies = [(await post(client, {"prompt": "x", "temperature": 0}))[1] for _ in range(2)]
    for body in bodies:
        del body["id"], body["created"]
    assert bodies[0] == bodies[1]


# --- cases -----------------------------------------------------------------------------------


def stop_rows():
    [case] = cases("api", "A2")
    return json.loads((CASES / case["file"]).read_text())


@pytest.mark.parametrize("row", stop_rows(), ids=lambda row: json.dumps(row["stop"]))
@pytest.mark.parametrize("path", [COMPLETIONS, "/generate", "/v1/generate", "/v1/chat/completions"])
async def test_a2_stop_is_text_list_or_nothing_and_never_ignored(serving, row, path):
    client = await serving(make_service(ScriptedEngine([*text("one STOP two"), EOS])))
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    status, body = await post(client, {**prompt, "stop": row["stop"]}, path)
    if row.get("status") == 400:
        assert (status, body["error"]["param"]) == (400, "stop")
        return
    assert status == 200
    answer = body["code"] if "code" in body else body["choices"][0]
    if isinstance(answer, dict):
        answer = answer["text"] if "text" in answer else answer["message"]["content"]
    expected = "one STOP two"
    for stop in row.get("as_", row["stop"]):
        expected = expected.split(stop)[0]
    assert answer == expected


async def test_more_stops_than_the_limit_are_refused(serving):
    client = await serving(make_service())
    status, body = await post(client, {"prompt": "x", "stop": [f"s{n}" for n in range(17)]})
    assert (status, body["error"]["param"]) == (400, "stop")


def t3_rows():
    [case] = cases("tokenizer", "T3")
    return json.loads((CASES / case["file"]).read_text())


@pytest.mark.parametrize("row", t3_rows(), ids=lambda row: "".join(row["chunks"]))
@pytest.mark.parametrize("path", [COMPLETIONS, "/generate", "/v1/chat/completions"])
async def test_t3_stops_across_tokens_are_the_same_everywhere(serving, row, path):
    script = [tuple(chunk.encode()) for chunk in row["chunks"]]
    engine = ScriptedEngine(script)
    client = await serving(make_service(engine))
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    request = {**prompt, "stop": row["stop"], "max_tokens": 100}
    _, body = await post(client, request, path)
    events = await stream(client, request, path)
    if path == "/generate":
        found = body["code"]
        streamed = "".join(e["text"] for e in events)
        finishes = {body["finish_reason"], events[-1]["finish_reason"]}
    else:
        choice = body["choices"][0]
        found = choice["text"] if "text" in choice else choice["message"]["content"]
        streamed = "".join(
            e["choices"][0].get("text", e["choices"][0].get("delta", {}).get("content", "")) for e in events
        )
        finishes = {choice["finish_reason"], events[-1]["choices"][0]["finish_reason"]}
    assert found == streamed == row["text"]
    assert finishes == {row["finish"]}
    stop_end = min(
        "".join(row["chunks"]).index(stop) + len(stop)
        for stop in row["stop"]
        if stop in "".join(row["chunks"])
    )
    generated = len("".join(row["chunks"])[:stop_end].encode())
    assert body["usage"]["completion_tokens"] == generated
    assert engine.cancelled == 2


async def test_a6_minus_infinity_is_one_documented_number_and_the_body_is_strict_json(serving):
    [case] = cases("api", "A6")
    plan = json.loads((CASES / case["file"]).read_text())
    values = [float(value) for value in plan["logprobs"]]
    client = await serving(make_service(ScriptedEngine(text("ab"), logprobs=values)))
    status, body = await post(client, plan["request"])
    assert status == 200
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"][0] is None
    assert sorted(logprobs["top_logprobs"][-1].values()) == [-9999.0, -3.5, 0.0]
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}
    _, body = await post(client, chat, "/v1/chat/completions")
    tops = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [t["logprob"] for t in tops] == [0.0, -9999.0, -3.5]


async def test_a6_a_logprob_that_is_no_number_fails_the_request(serving):
    client = await serving(make_service(ScriptedEngine(text("ab"), logprobs=[math.nan])))
    status, body = await post(client, {"prompt": "x", "logprobs": 1})
    assert (status, body["error"]["code"]) == (500, "internal-error")
    assert "nan" not in json.dumps(body).lower().replace("answering", "")


def t8_rows():
    [case] = cases("tokenizer", "T8")
    return json.loads((CASES / case["file"]).read_text())


@pytest.mark.parametrize("row", t8_rows(), ids=lambda row: json.dumps(row["body"]))
@pytest.mark.parametrize("has_bos", [True, False])
async def test_t8_empty_input_is_answered_or_refused_and_never_a_500(serving, row, has_bos):
    client = await serving(make_service(tokenizer=byte_tokenizer(bos=has_bos)))
    path = COMPLETIONS if row.get("endpoint") == "completions" else "/v1/chat/completions"
    status, body = await post(client, row["body"], path)
    expected = row["status"]
    if not isinstance(expected, int):
        expected = 200 if has_bos else 400
    assert status == expected
    if status == 400:
        wanted = row.get("param")
        assert body["error"]["param"] == wanted if wanted else body["error"]["param"].startswith("prompt")
        assert row.get("mention", "") in body["error"]["message"]


async def test_d1_an_answer_does_not_depend_on_its_companions(serving):
    """At this level: requests do not mix. That lanes keep the promise is tested where batches are made."""
    plan = json.loads((CASES / "hand/determinism/D1_plan.json").read_text())

    def script(params):
        return list(hashlib.sha256(json.dumps([params.token_ids, params.sampling.sample]).encode()).digest())

    client = await serving(
        make_service(ScriptedEngine(script, delay_s=0.001), info=model_info(context_length=2048))
    )
    body = {"prompt": plan["prompt"], "temperature": 0, "max_tokens": plan["max_tokens"], "logprobs": 0}
    outcomes = set()

    async def ask(streamed=False):
        if streamed:
            events = await stream(client, body)
            logprobs = [
                lp
                for e in events
                if e["choices"][0]["logprobs"]
                for lp in e["choices"][0]["logprobs"]["tokens"]
            ]
            outcomes.add(hashlib.sha256(json.dumps(logprobs).encode()).hexdigest())
        else:
            _, answer = await post(client, body)
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            outcomes.add(hashlib.sha256(json.dumps(tokens).encode()).hexdigest())

    for companions in plan["companions"]:
        others = [
            post(client, {"prompt": plan["companion_prompts"][n % 3], "max_tokens": 20})
            for n in range(companions)
        ]
        await asyncio.gather(ask(), *others, ask(streamed=True))
    assert len(outcomes) == 1


async def test_comments_keep_a_stream_open_only_while_nothing_comes(serving, monkeypatch):
    async def blocks_with(delay_s: float) -> list[str]:
        client = await serving(make_service(ScriptedEngine(text("abcd"), delay_s=delay_s)))
        async with client.post(COMPLETIONS, json={"prompt": "x", "stream": True}) as response:
            return (await response.text()).split("\n\n")[:-1]

    monkeypatch.setattr("vox_host.server.exchange.KEEPALIVE_S", 0.05)
    waited = await blocks_with(0.13)
    assert waited[0] == ": keepalive", "the first comes before the answer does"
    assert 4 <= waited.count(": keepalive") <= 12
    events = [block for block in waited if block != ": keepalive"]
    assert len(events) == 6 and events[-1] == "data: [DONE]"
    monkeypatch.setattr("vox_host.server.exchange.KEEPALIVE_S", 5.0)
    assert ": keepalive" not in await blocks_with(0.01)
