"""POST /v1/chat/completions: the next turn of a conversation."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vox_host.app.service import Answer, AnswerEnd, AnswerPiece, ModelInfo, ModelService
from vox_host.app.usage import cached_of_prompt, usage
from vox_host.chat.messages import MessageError, parse_messages
from vox_host.server.api_error import bad_request
from vox_host.server.body import read_json_object
from vox_host.server.choices import Job, collect_all, stream_all
from vox_host.server.completion import Prompt, make_jobs
from vox_host.server.exchange import EXCHANGE, json_response, stream_events
from vox_host.server.fields import Fields
from vox_host.server.options import Options, check_model, parse_options, refuse_unsupported
from vox_host.server.shapes import chat_logprobs, provenance

__all__ = ["handle_chat_completion"]

MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A checked request."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    template_variables: dict[str, Any]
    options: Options
    logprobs: int | None
    warnings: tuple[str, ...]


def parse_request(fields: Fields, info: ModelInfo) -> ChatRequest:
    """Read a request.

    Raises:
        ApiError: 400, naming the field.
    """
    check_model(fields, info)
    try:
        messages = parse_messages(fields.raw("messages"))
    except MessageError as problem:
        raise bad_request(problem.param, str(problem)) from None
    refuse_unsupported(fields)
    if fields.flag("echo"):
        raise bad_request("echo", "echo is an option of /v1/completions", code="not_supported")
    tools, warnings = _parse_tools(fields)
    return ChatRequest(
        messages=messages,
        tools=tools,
        template_variables=fields.object("chat_template_kwargs"),
        options=parse_options(
            fields,
            info,
            max_tokens_names=("max_completion_tokens", "max_tokens"),
            default_max_tokens=None,
            least_max_tokens=0,
        ),
        logprobs=_parse_logprobs(fields),
        warnings=warnings,
    )


def _parse_logprobs(fields: Fields) -> int | None:
    wants = fields.flag("logprobs")
    top = fields.integer("top_logprobs", low=0, high=MAX_TOP_LOGPROBS)
    if top is not None and not wants:
        if top == 0:
            return None
        raise bad_request("top_logprobs", "top_logprobs needs logprobs to be true")
    return (top or 0) if wants else None


def _parse_tools(fields: Fields) -> tuple[list[Any] | None, tuple[str, ...]]:
    value = fields.raw("tools")
    if value is None or value == []:
        return None, ()
    if not isinstance(value, list):
        raise bad_request("tools", "tools must be a list")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise bad_request(
                f"tools[{index}].function.name", f"tools[{index}] must be a function with a name"
            )
    if fields.raw("tool_choice") == "none":
        return None, ()
    return value, (
        "tools: they are shown to the model through its template; a call in the answer stays in "
        "content as the model wrote it",
    )


async def handle_chat_completion(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/chat/completions."""
    exchange = request.app[EXCHANGE]
    service = exchange.service
    fields = Fields(await read_json_object(request))
    wanted = parse_request(fields, service.info)
    options = wanted.options
    ids = await service.encode_chat(wanted.messages, tools=wanted.tools, variables=wanted.template_variables)
    if not ids:
        raise bad_request("messages", "the chat template made no prompt of these messages")
    jobs = make_jobs([Prompt(tuple(ids))], options, service, logprobs=wanted.logprobs)
    writer = _Writer(service, wanted, len(ids))
    headers = exchange.headers(options.seed)
    with exchange.admission.admitted(len(jobs)) as slots:
        if options.stream:
            return await stream_events(request, writer.events(jobs, slots), headers=headers)
        answers = await collect_all(service, jobs, slots)
    return json_response(writer.whole(answers), headers=headers)


class _Writer:
    """Shapes the answers of one request."""

    def __init__(self, service: ModelService, wanted: ChatRequest, prompt_tokens: int) -> None:
        self._service = service
        self._wanted = wanted
        self._prompt_tokens = prompt_tokens
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": service.info.name,
            "system_fingerprint": None,
        }
        self._extensions = {
            "seed": wanted.options.seed,
            "vox": provenance(service.info, warnings=wanted.warnings),
        }

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        generated = 0
        ends = []
        for index, answer in enumerate(answers):
            assert answer.end is not None
            generated += answer.end.generated_tokens
            ends.append(answer.end)
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": answer.text, "refusal": None},
                    "logprobs": self._logprobs(answer.tokens),
                    "finish_reason": answer.end.finish_reason,
                }
            )
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(self._prompt_tokens, generated, [cached_of_prompt(ends)]),
            **self._extensions,
        }

    async def events(self, jobs: Sequence[Job], slots: Any) -> AsyncGenerator[dict[str, Any], None]:
        head = {**self._head, "object": "chat.completion.chunk"}
        extensions: dict[str, Any] = self._extensions
        has_begun = [False] * len(jobs)
        generated = 0
        ends = []
        async with contextlib.aclosing(stream_all(self._service, jobs, slots)) as items:
            async for index, item in items:
                if not has_begun[index]:
                    has_begun[index] = True
                    delta = {"role": "assistant", "content": ""}
                    yield {**head, "choices": [_chunk_choice(index, delta)], **extensions}
                    extensions = {}
                match item:
                    case AnswerPiece() if item.text or self._wanted.logprobs is not None:
                        delta = {"content": item.text}
                        logprobs = self._logprobs(item.tokens)
                        yield {**head, "choices": [_chunk_choice(index, delta, logprobs)]}
                    case AnswerEnd():
                        generated += item.generated_tokens
                        ends.append(item)
                        choice = _chunk_choice(index, {}, finish_reason=item.finish_reason)
                        yield {**head, "choices": [choice]}
        if self._wanted.options.include_usage:
            counts = usage(self._prompt_tokens, generated, [cached_of_prompt(ends)])
            yield {**head, "choices": [], "usage": counts}

    def _logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        if self._wanted.logprobs is None:
            return None
        return chat_logprobs(tokens, self._service.tokenizer, self._wanted.logprobs)


def _chunk_choice(
    index: int,
    delta: dict[str, Any],
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
