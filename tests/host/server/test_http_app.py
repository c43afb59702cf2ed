"""Routing, bodies, keys, hosts, origins, limits, hang-ups: what every endpoint shares."""

from __future__ import annotations

import asyncio
import io
import json
import time

import pytest

from fixtures.scripted_service import CASES, ScriptedEngine, cases, make_service, model_info, text
from vox_host.app.model_info import AdapterInfo
from vox_host.app.service import EngineHealth
from vox_host.errors import WorkerFailedError
from vox_host.server.admission import Admission
from vox_host.server.body import MAX_BODY_BYTES

CHAT = "/v1/chat/completions"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello"}]}
JSON = {"Content-Type": "application/json"}


async def checked_error(response) -> dict:
    """Return the error of a response that has OpenAI's form and gives nothing away."""
    body = json.loads(await response.text())
    assert response.headers["Content-Type"].startswith("application/json")
    assert set(body) == {"error"}
    assert {"message", "type", "param", "code"} <= set(body["error"])
    assert isinstance(body["error"]["message"], str) and body["error"]["message"]
    for leak in ("Traceback", 'File "', "site-packages", "/work", "/home", ".py"):
        assert leak not in body["error"]["message"]
    assert response.headers["x-request-id"]
    return body["error"]


async def is_alive(client) -> bool:
    async with client.get("/health") as response:
        return response.status == 200


@pytest.mark.parametrize("case", cases("api", "A7"), ids=lambda c: c["file"])
async def test_a7_a_body_that_is_no_request_is_an_error_object(serving, case):
    client = await serving(make_service())
    for path in (CHAT, "/v1/completions", "/generate"):
        async with client.post(path, data=(CASES / case["file"]).read_bytes(), headers=JSON) as response:
            assert response.status == 400
            error = await checked_error(response)
    if "role" in case["file"]:
        async with client.post(CHAT, data=(CASES / case["file"]).read_bytes(), headers=JSON) as response:
            assert (await checked_error(response))["param"] == "messages[0].role"
    else:
        assert error["code"] == "invalid_json"
    assert await is_alive(client)


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "a\xff"}', b'{"temperature": NaN}', b'{"seed": Infinity}',
     b'{"seed": ' + b"9" * 5000 + b"}",
     b'{"a":' * 2000 + b"1" + b"}" * 2000, b'{"a":' * 70 + b"1" + b"}" * 70, b'{"prompt": "\\ud800"}',
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b"\xef\xbb\xbf", b"{}garbage"],
    ids=lambda b: repr(b[:20]),
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
async def test_other_bodies_that_break_parsers_are_400_too(serving, body, path):
    client = await serving(make_service())
    async with client.post(path, data=body, headers=JSON) as response:
        assert response.status == 400
        await checked_error(response)
    assert await is_alive(client)


async def test_a7_other_methods_paths_models_sizes_and_types(serving):
    client = await serving(make_service())
    async with client.get(CHAT) as response:
        assert response.status == 405 and response.headers["Allow"] == "POST"
        await checked_error(response)
    async with client.post("/health") as response:
        assert response.status == 405
        await checked_error(response)
    for path in ("/", "/v2/chat", "/v1/embeddings"):
        async with client.get(path) as response:
            assert response.status == 404
            await checked_error(response)
    for path, body in ((CHAT, HELLO), ("/v1/completions", {"prompt": "x"}), ("/generate", {"prompt": "x"})):
        async with client.post(path, json={**body, "model": "other"}) as response:
            assert response.status == 404
            error = await checked_error(response)
            assert (error["code"], error["param"]) == ("model_not_found", "model")
    async with client.get("/v1/models/other/one") as response:
        assert response.status == 404
        assert (await checked_error(response))["code"] == "model_not_found"
    async with client.post(CHAT, data=io.BytesIO(b" " * 60_000_000), headers=JSON) as response:
        assert response.status == 413
        await checked_error(response)

    # Without a declared length, too.
    async def chunks():
        for _ in range(MAX_BODY_BYTES // 2**20 + 2):
            yield b" " * 2**20

    async with client.post(CHAT, data=chunks(), headers=JSON) as response:
        assert response.status == 413
        await checked_error(response)
    data = json.dumps(HELLO).encode()
    for content_type, status in (
        ("application/json; charset=utf-8", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
    ):
        async with client.post(CHAT, data=data, headers={"Content-Type": content_type}) as response:
            assert response.status == status
            if status == 415:
                await checked_error(response)
    async with client.post(CHAT, data=data, skip_auto_headers=["Content-Type"]) as response:
        assert response.status == 200
    assert await is_alive(client)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "hot"), ("temperature", -1), ("temperature", True), ("temperature", 1e400),
        ("top_p", 1.5), ("top_k", -2), ("min_p", []), ("n", 0), ("n", 129), ("n", 1.5), ("seed", 2**64),
        ("seed", "x"), ("max_tokens", -1), ("max_tokens", "9"), ("stream", "yes"), ("stop", 5),
        ("presence_penalty", 3), ("logit_bias", {"999": 1}),
        ("logit_bias", {"a": 1}), ("logit_bias", {"1": 101}),
        ("logit_bias", []), ("stream_options", 1), ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {}}), ("response_format", "json"),
        ("tool_choice", "required"), ("functions", [{}]), ("grammar", "root ::= x"), ("min_tokens", 3),
        ("modalities", ["text", "audio"]), ("stop_token_ids", [-1]), ("model", 5), ("adapter", "x"),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
async def test_a_field_that_can_not_be_honoured_is_named(serving, path, field, value):
    client = await serving(make_service())
    body = {"messages": HELLO["messages"]} if path == CHAT else {"prompt": "x"}
    if value == 1e400:
        data = json.dumps({**body, field: 0}).replace('"temperature": 0', '"temperature": 1e400')
    else:
        data = json.dumps({**body, field: value})
    async with client.post(path, data=data, headers=JSON) as response:
        assert response.status == 400
        error = await checked_error(response)
    assert error["param"].startswith(field)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
async def test_fields_without_effect_and_unknown_ones_are_ignored(serving, path):
    client = await serving(make_service())
    body = {"messages": HELLO["messages"]} if path == CHAT else {"prompt": "x"}
    extra = {
        "user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "low", "verbosity": "low", "safety_identifier": "s", "prompt_cache_key": "k",
        "response_format": {"type": "text"}, "tool_choice": "auto", "modalities": ["text"], "best_of": 1,
        "unheard_of": {"x": 1}, "temperature": None, "seed": None, "stop": None, "logit_bias": None,
        "n": None,
    }  # fmt: skip
    async with client.post(path, json={**body, **extra}) as response:
        assert response.status == 200, await response.text()


# --- who may ask -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Basic secret"}, 401),
        ({"X-Api-Key": "secre"}, 401), ({"Authorization": "Bearer sécret"}, 401),
        ({"Authorization": "Bearer secret"}, 200), ({"authorization": "bearer secret"}, 200),
        ({"X-Api-Key": "secret"}, 200), ({"Authorization": "Bearer x", "X-Api-Key": "secret"}, 200),
    ],
    ids=str,
)  # fmt: skip
async def test_with_a_key_everything_but_health_needs_it(serving, headers, status):
    client = await serving(make_service(), api_key="secret")
    for method, path in (("GET", "/v1/models"), ("GET", "/v1/backends"), ("GET", "/nowhere"), ("POST", CHAT)):
        body = {"json": HELLO} if method == "POST" else {}
        async with client.request(method, path, headers=headers, **body) as response:
            assert response.status == (404 if (status, path) == (200, "/nowhere") else status)
            if status == 401:
                assert (await checked_error(response))["type"] == "authentication_error"
    assert await is_alive(client)


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:80", 200), ("[::1]:11434", 200), ("evil.example", 403),
     ("localhost.evil.example", 403), ("127.0.0.1.evil.example:80", 403), ("", 403), ("[::1", 403)],
)  # fmt: skip
async def test_on_loopback_the_host_header_must_name_loopback(serving, host, status):
    client = await serving(make_service())
    async with client.get("/health", headers={"Host": host}) as response:
        assert response.status == status
    client = await serving(make_service(), checks_host=False)
    async with client.get("/health", headers={"Host": host}) as response:
        assert response.status == 200


@pytest.mark.parametrize(
    ("origin", "is_local"),
    [("http://localhost:3000", True), ("http://127.0.0.1", True), ("https://[::1]:8", True),
     ("https://evil.example", False), ("http://localhost.evil.example", False), ("null", False)],
)  # fmt: skip
async def test_pages_of_this_machine_get_cors_headers_and_others_nothing(serving, origin, is_local):
    client = await serving(make_service())
    async with client.options(CHAT, headers={"Origin": origin}) as response:
        assert response.status == 200
        assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_local else None)
    async with client.post(CHAT, json=HELLO, headers={"Origin": origin}) as response:
        assert response.status == (200 if is_local else 403)
        assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_local else None)
    async with client.post(CHAT, json={**HELLO, "stream": True}, headers={"Origin": origin}) as response:
        assert response.headers.get("Access-Control-Allow-Origin") == (origin if is_local else None)


async def test_request_ids_are_echoed_or_made_and_never_reflect_junk(serving):
    client = await serving(make_service())
    async with client.get("/health", headers={"X-Request-Id": "abc-123"}) as response:
        assert response.headers["x-request-id"] == "abc-123"
    async with client.get("/health", headers={"X-Request-Id": "a b<script>"}) as response:
        assert response.headers["x-request-id"].startswith("req_")
    async with client.post(CHAT, json={**HELLO, "stream": True}, headers={"X-Request-Id": "s1"}) as response:
        assert response.headers["x-request-id"] == "s1"


# --- what it says about itself ---------------------------------------------------------------


async def test_health_is_true_only_while_requests_are_answered(serving):
    engine = ScriptedEngine(text("x"))
    client = await serving(make_service(engine, info=model_info(degraded="running on the CPU; no driver")))
    async with client.get("/health") as response:
        body = await response.json()
    assert (response.status, body["status"], body["service"], body["ready"]) == (200, "ok", "vox-host", True)
    assert (body["plugin"], body["lane"], body["degraded"]) == (
        "scripted",
        "cpu",
        "running on the CPU; no driver",
    )
    engine.is_ready = False
    async with client.get("/health") as response:
        body = await response.json()
    assert (response.status, body["ready"], body["state"]) == (503, False, "restarting")
    assert response.headers["retry-after"]
    engine.is_ready = True
    assert await is_alive(client)


async def test_an_integer_too_long_to_read_is_told_in_our_own_words(serving):
    client = await serving(make_service())
    async with client.post(CHAT, data=b'{"seed": ' + b"9" * 5000 + b"}", headers=JSON) as response:
        assert response.status == 400
        message = (await checked_error(response))["message"]
    assert message == "the body is not JSON that can be read: an integer has too many digits"


@pytest.mark.parametrize("path", ["/health", "/v1/health", "/v1/models", "/v1/models/m", "/v1/backends"])
async def test_head_is_get_without_a_body(serving, path):
    engine = ScriptedEngine(text("x"))
    client = await serving(make_service(engine))
    async with client.head(path) as response:
        assert (response.status, await response.read()) == (200, b"")
    if "health" in path:
        engine.is_ready = False
        async with client.head(path) as response:
            assert response.status == 503


async def test_an_adapter_is_shown_with_its_base(serving):
    adapter = AdapterInfo(
        digest="cd" * 32, file_digest="ef" * 32, base="tiny", origin="run", rank=8, layers=126
    )
    client = await serving(
        make_service(ScriptedEngine(text("x")), info=model_info(name="tools", adapter=adapter))
    )
    async with client.get("/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["parent"]) == ("tools", "tiny")
    assert model["vox"]["adapter"] == adapter.as_dict()
    async with client.get("/health") as response:
        health = await response.json()
    assert (health["model"], health["adapter"]["digest"]) == ("tools", "cd" * 32)
    assert health["adapter"]["applied"] == "unmerged"
    async with client.post("/v1/completions", json={"prompt": "x", "model": "tools"}) as response:
        assert (await response.json())["vox"]["adapter_digest"] == "cd" * 32
    client = await serving(make_service(ScriptedEngine(text("x"))))
    async with client.get("/health") as response:
        assert (await response.json())["adapter"] is None


async def test_one_token_is_not_tokens(serving):
    client = await serving(make_service(info=model_info(context_length=1)))
    async with client.post("/v1/completions", json={"prompt": [65]}) as response:
        message = (await checked_error(response))["message"]
    assert "the prompt has 1 token and" in message


async def test_what_failed_for_good_is_told_without_paths_and_without_a_time_to_come_back(serving):
    why = "the worker can't be started again: /srv/models/tiny/model-manifest.json is gone"

    class Failed(ScriptedEngine):
        def health(self) -> EngineHealth:
            return EngineHealth(False, "failed", why)

        async def generate(self, params):
            raise WorkerFailedError("worker-failed", why, remedy="Restart `vox-host serve`.")
            yield

    info = model_info(warnings=("/srv/plugins/x/Plugin.toml has no receipt",))
    client = await serving(make_service(Failed(), info=info))
    async with client.get("/health") as response:
        assert (response.status, "retry-after" in response.headers) == (503, False)
        body = await response.json()
    assert body["warnings"] == ["Plugin.toml has no receipt"]
    detail = body["detail"]
    async with client.post(CHAT, json=HELLO) as response:
        assert (response.status, "retry-after" in response.headers) == (503, False)
        message = (await checked_error(response))["message"]
    for shown in (detail, message):
        assert "again: model-manifest.json is gone" in shown
    assert message.endswith("Restart `vox-host serve`.")


async def test_a_degraded_lane_is_said_in_each_response(serving):
    client = await serving(make_service(info=model_info(degraded="running on the CPU;\nno driver")))
    async with client.post(CHAT, json=HELLO) as response:
        assert response.headers["x-vox-degraded"] == "running on the CPU; no driver"
        assert (await response.json())["vox"]["degraded"].startswith("running on the CPU")


@pytest.mark.parametrize("words", ["\x1b[31mred", "a\x00b", "ü\u202eb", "long " * 2000])
async def test_whatever_a_plugin_says_of_its_fall_there_is_an_answer(serving, words):
    client = await serving(make_service(info=model_info(degraded=words)))
    async with client.post(CHAT, json=HELLO) as response:
        assert response.status == 200
        told = response.headers["x-vox-degraded"]
        assert told.isascii() and told.isprintable() and len(told) <= 1000
        assert (await response.json())["vox"]["degraded"] == words


async def test_models_and_backends_list_what_is_served(serving):
    record = {
        "plugin_id": "scripted",
        "stage": "found",
        "status": "passed",
        "code": "found",
        "detail": "here",
    }
    client = await serving(make_service(info=model_info(backends=(record,))))
    async with client.get("/v1/models") as response:
        body = await response.json()
    [model] = body["data"]
    assert body["object"] == "list"
    assert (model["id"], model["object"], model["owned_by"]) == ("m", "model", "vox-host")
    assert (model["max_model_len"], model["model_context_length"]) == (512, 2048)
    async with client.get("/v1/models/m") as response:
        assert await response.json() == model
    async with client.get("/v1/backends") as response:
        body = await response.json()
    assert body["data"] == [record]
    assert body["selected"]["plugin"] == "scripted"


# --- limits and hang-ups ---------------------------------------------------------------------


async def until(condition, limit_s=2.0):
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/generate"])
async def test_a_client_that_hangs_up_cancels_its_answer_within_a_token(serving, path, streamed):
    engine = ScriptedEngine(text("y" * 400), delay_s=0.02)
    client = await serving(make_service(engine))
    body = {"messages": HELLO["messages"]} if path == CHAT else {"prompt": "x"}
    request = asyncio.create_task(
        client.post(path, json={**body, "stream": streamed, "max_tokens": 400}).__aenter__()
    )
    if streamed:
        response = await request
        await response.content.readany()
        response.close()
    else:
        await until(lambda: engine.produced >= 2)
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
    await until(lambda: engine.running == 0)
    assert engine.cancelled == 1
    assert engine.produced < 20
    async with client.get("/health") as response:
        assert (await response.json())["answers_in_flight"] == 0


async def test_a_full_queue_is_a_429_with_a_time_to_come_back_and_drains(serving):
    engine = ScriptedEngine(text("abcd"), delay_s=0.05)
    client = await serving(make_service(engine), admission=Admission(running=1, waiting=1))

    async def ask():
        async with client.post(CHAT, json=HELLO) as response:
            return response.status, response.headers.get("retry-after"), await response.json()

    answers = await asyncio.gather(*(ask() for _ in range(4)))
    assert sorted(status for status, _, _ in answers) == [200, 200, 429, 429]
    refused = next(a for a in answers if a[0] == 429)
    assert refused[1] == "1" and refused[2]["error"]["code"] == "queue_full"
    assert engine.most_running == 1
    assert (await ask())[0] == 200


async def test_more_answers_than_can_ever_be_admitted_is_a_400(serving):
    client = await serving(make_service(), admission=Admission(running=2, waiting=1))
    async with client.post(CHAT, json={**HELLO, "n": 4}) as response:
        assert response.status == 400
        assert (await checked_error(response))["param"] == "n"


async def test_one_failing_choice_ends_the_others(serving):
    engine = ScriptedEngine(text("abcdef" * 20), delay_s=0.01, fail_after=3)
    client = await serving(make_service(engine))
    async with client.post(CHAT, json={**HELLO, "n": 3}) as response:
        assert response.status == 503
    await until(lambda: engine.running == 0)


async def test_a9_a_huge_prompt_is_refused_promptly_while_others_are_served(serving):
    [case] = cases("api", "A9")
    plan = json.loads((CASES / case["file"]).read_text())
    client = await serving(make_service(ScriptedEngine(text("ok"))))
    latencies: list[float] = []
    is_over = asyncio.Event()

    async def poll():
        while not is_over.is_set():
            began = time.perf_counter()
            assert await is_alive(client)
            latencies.append(time.perf_counter() - began)
            await asyncio.sleep(0.1)

    async def huge(path, body):
        data = io.BytesIO(json.dumps(body).encode())
        async with client.post(path, data=data, headers=JSON) as response:
            return response.status, await response.json()

    polling = asyncio.create_task(poll())
    await asyncio.sleep(0.01)
    began = time.perf_counter()
    content = "hello " * 900_000
    chat, completion, (beside, _) = await asyncio.gather(
        huge(CHAT, {"model": "m", "messages": [{"role": "user", "content": content}]}),
        huge("/v1/completions", {"prompt": content}),
        huge(CHAT, plan["beside"]),
    )
    took = time.perf_counter() - began
    is_over.set()
    await polling
    for (status, body), param in ((chat, "messages"), (completion, "prompt")):
        assert status == 400
        assert (body["error"]["code"], body["error"]["param"]) == ("context_length_exceeded", param)
        assert "512" in body["error"]["message"]
        assert str(body["error"]["facts"]["prompt_tokens"]) in body["error"]["message"]
        assert body["error"]["facts"]["prompt_tokens"] > 4_000_000
    assert beside == 200
    assert max(latencies) < 0.5
    assert took < 10
