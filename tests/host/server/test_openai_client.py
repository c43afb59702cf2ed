"""The newest `openai` client as an outside judge, against a live server on loopback."""

from __future__ import annotations

import asyncio

import pytest

from fixtures.scripted_service import EOS, ScriptedEngine, drawn, make_service, model_info, text
from vox_host.server.admission import Admission

openai = pytest.importorskip("openai")

MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
async def connect(serving):
    clients = []

    async def start(engine: ScriptedEngine, *, api_key: str | None = None, key: str = "none", **options):
        info = options.pop("info", None)
        template = options.pop("template", "")
        service = make_service(engine, info=info, **({"template": None} if template is None else {}))
        test_client = await serving(service, api_key=api_key, **options)
        client = openai.AsyncOpenAI(base_url=str(test_client.make_url("/v1")), api_key=key, max_retries=0)
        clients.append(client)
        return client

    yield start
    for client in clients:
        await client.close()


async def test_chat_whole_and_streamed(connect):
    client = await connect(ScriptedEngine([*text("Hello, 漢字!"), EOS]))
    whole = await client.chat.completions.create(model="m", messages=MESSAGES, seed=1)
    assert whole.choices[0].message.content == "Hello, 漢字!"
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    assert whole.model_extra["vox"]["lane"] == "cpu" and whole.model_extra["seed"] == 1
    assert whole._request_id
    stream = await client.chat.completions.create(
        model="m", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello, 漢字!"
    assert chunks[-1].usage == whole.usage
    async with client.chat.completions.stream(model="m", messages=MESSAGES) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.content == "Hello, 漢字!"


async def test_completions_logprobs_and_models(connect):
    client = await connect(ScriptedEngine(text("abc")))
    answer = await client.completions.create(model="m", prompt=[[1, 2]], max_tokens=2, logprobs=1, echo=True)
    assert answer.choices[0].logprobs.tokens == ["\x01", "\x02", "a", "b"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None
    chat = await client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, top_logprobs=2)
    assert [entry.token for entry in chat.choices[0].logprobs.content] == ["a", "b", "c"]
    models = [model.id async for model in client.models.list()]
    assert models == ["m"]
    assert (await client.models.retrieve("m")).id == "m"
    several = await client.chat.completions.create(model="m", messages=MESSAGES, n=3, temperature=0)
    assert [choice.index for choice in several.choices] == [0, 1, 2]


async def test_every_status_is_the_clients_own_exception(connect):
    client = await connect(ScriptedEngine(text("abc"), fail_after=1), info=model_info(context_length=40))
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x" * 99}])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.NotFoundError) as caught:
        await client.chat.completions.create(model="other", messages=MESSAGES)
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.InternalServerError) as caught:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert (caught.value.status_code, caught.value.code) == (503, "worker-died")
    stream = await client.completions.create(model="m", prompt="x", stream=True)
    received = []
    with pytest.raises(openai.APIError) as error:
        async for chunk in stream:
            received.append(chunk.choices[0].text)  # noqa: PERF401 -- it ends in an error
    assert "".join(received) == "a"
    assert error.value.code == "worker-died"


async def test_a_wrong_key_and_a_base_model(connect):
    client = await connect(ScriptedEngine(), api_key="secret", key="wrong")
    with pytest.raises(openai.AuthenticationError):
        await client.models.list()
    client = await connect(ScriptedEngine(), api_key="secret", key="secret", template=None)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.code == "no-chat-template"


async def test_the_clients_own_retries_get_through_a_full_queue(connect):
    engine = ScriptedEngine(drawn, delay_s=0.005)
    client = await connect(engine, admission=Admission(running=1, waiting=0))
    patient = client.with_options(max_retries=6)
    answers = await asyncio.gather(
        *(patient.completions.create(model="m", prompt="x", max_tokens=3, temperature=0) for _ in range(2))
    )
    assert len({answer.choices[0].text for answer in answers}) == 1
    assert engine.most_running == 1


async def test_closing_a_stream_cancels_the_answer(connect):
    engine = ScriptedEngine(text("y" * 300), delay_s=0.02)
    client = await connect(engine)
    stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
    async for _ in stream:
        break
    await stream.close()
    async with asyncio.timeout(2):
        while engine.running:
            await asyncio.sleep(0.01)
    assert engine.cancelled == 1
