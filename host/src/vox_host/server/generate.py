"""POST /generate and /v1/generate: one prompt, one answer, as the orchestrator's client asks for it.

The reply's `code` is the generated text and `valid` says that the answer is whole: it ended by
itself or at a stop string, and was not cut by the token limit.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from aiohttp import web

from vox_host.app.service import Answer, AnswerEnd, AnswerPiece, ModelService
from vox_host.app.usage import usage
from vox_host.server.api_error import bad_request
from vox_host.server.body import read_json_object
from vox_host.server.choices import Job, collect_all, stream_all
from vox_host.server.completion import make_jobs, parse_prompts
from vox_host.server.exchange import EXCHANGE, json_response, stream_events
from vox_host.server.fields import Fields
from vox_host.server.options import check_model, parse_options, refuse_unsupported
from vox_host.server.shapes import provenance

__all__ = ["handle_generate"]

DEFAULT_MAX_TOKENS = 256


async def handle_generate(request: web.Request) -> web.StreamResponse:
    """Answer POST /generate."""
    exchange = request.app[EXCHANGE]
    service = exchange.service
    fields = Fields(await read_json_object(request))
    check_model(fields, service.info)
    refuse_unsupported(fields)
    options = parse_options(fields, service.info, default_max_tokens=DEFAULT_MAX_TOKENS, least_max_tokens=0)
    if options.n != 1:
        raise bad_request("n", "n is an option of /v1/completions; this endpoint gives one answer")
    prompts = await parse_prompts(fields.raw("prompt"), service)
    if len(prompts) != 1:
        raise bad_request("prompt", "prompt must be one prompt; /v1/completions takes several")
    jobs = make_jobs(prompts, options, service)
    headers = exchange.headers(options.seed)
    with exchange.admission.admitted(1) as slots:
        if options.stream:
            return await stream_events(request, _events(service, jobs, slots, options.seed), headers=headers)
        [answer] = await collect_all(service, jobs, slots)
    return json_response(_reply(service, answer, options.seed), headers=headers)


def _reply(service: ModelService, answer: Answer, seed: int) -> dict[str, Any]:
    assert answer.end is not None
    return {
        "code": answer.text,
        "valid": answer.end.finish_reason == "stop",
        "text": answer.text,
        "token_ids": [token.token_id for token in answer.tokens],
        "finish_reason": answer.end.finish_reason,
        "model": service.info.name,
        "usage": usage(answer.end.prompt_tokens, answer.end.generated_tokens, [answer.end.cached_tokens]),
        "seed": seed,
        "vox": provenance(service.info),
    }


async def _events(
    service: ModelService, jobs: list[Job], slots: Any, seed: int
) -> AsyncGenerator[dict[str, Any], None]:
    whole = Answer()
    async with contextlib.aclosing(stream_all(service, jobs, slots)) as items:
        async for _, item in items:
            match item:
                case AnswerPiece():
                    whole.text += item.text
                    whole.tokens.extend(item.tokens)
                    if item.text:
                        yield {"text": item.text}
                case AnswerEnd():
                    whole.end = item
    yield {**_reply(service, whole, seed), "text": ""}
