"""POST /v1/completions: continue text or token ids, in batches, with scores of the prompt if asked."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from vox_host.app.service import (
    Answer,
    AnswerEnd,
    AnswerPiece,
    AnswerToken,
    ModelInfo,
    ModelService,
    PromptScores,
)
from vox_host.app.usage import cached_of_prompt, usage
from vox_host.chat.text_stream import TextStream
from vox_host.server.api_error import ApiError, bad_request
from vox_host.server.body import read_json_object
from vox_host.server.choices import Job, collect_all, stream_all
from vox_host.server.exchange import EXCHANGE, json_response, stream_events
from vox_host.server.fields import Fields, check_text
from vox_host.server.options import Options, check_model, parse_options, refuse_unsupported
from vox_host.server.shapes import completion_logprobs, prompt_tokens_of, provenance
from vox_plugin_api import messages as m

__all__ = ["Prompt", "handle_completion", "make_jobs", "parse_prompts"]

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `text` is None where it came as token ids."""

    token_ids: tuple[int, ...]
    text: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """A checked request, but for its prompts."""

    options: Options
    echo: bool
    logprobs: int | None


def parse_request(fields: Fields, info: ModelInfo) -> CompletionRequest:
    """Read everything but the prompts.

    Raises:
        ApiError: 400, naming the field.
    """
    check_model(fields, info)
    refuse_unsupported(fields)
    logprobs = fields.raw("logprobs")
    if isinstance(logprobs, bool):
        # vLLM's clients send the chat form here.
        logprobs = 0 if logprobs else None
    else:
        logprobs = fields.integer("logprobs", low=0, high=MAX_LOGPROBS)
    return CompletionRequest(
        options=parse_options(
            fields,
            info,
            max_tokens_names=("max_tokens", "max_completion_tokens"),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            least_max_tokens=0,
        ),
        echo=fields.flag("echo"),
        logprobs=logprobs,
    )


async def parse_prompts(value: Any, service: ModelService) -> list[Prompt]:
    """Return the prompts as token ids: a text, a list of texts, token ids, or a list of those.

    Raises:
        ApiError: 400, naming the prompt.
        ContextOverflowError: one doesn't fit.
    """
    if value is None:
        raise bad_request("prompt", "prompt is required", code="missing_required_parameter")
    if isinstance(value, str) or (isinstance(value, list) and value and _is_token_id(value[0])):
        return [await _parse_prompt(value, "prompt", service)]
    if not isinstance(value, list):
        raise bad_request("prompt", "prompt must be text, a list of texts, token ids, or lists of token ids")
    if not value:
        raise bad_request("prompt", "prompt must not be empty")
    if len(value) > MAX_PROMPTS:
        raise bad_request("prompt", f"prompt may hold at most {MAX_PROMPTS} prompts, not {len(value)}")
    return [await _parse_prompt(item, f"prompt[{index}]", service) for index, item in enumerate(value)]


def _is_token_id(value: object) -> bool:
    return isinstance(value, int | float)


async def _parse_prompt(value: Any, param: str, service: ModelService) -> Prompt:
    if isinstance(value, str):
        ids = await service.encode_prompt(check_text(value, param))
        if not ids:
            raise bad_request(param, f"{param} is empty, and this model has no token to begin a text with")
        return Prompt(tuple(ids), value)
    if not isinstance(value, list) or not value:
        raise bad_request(param, f"{param} must be text or a non-empty list of token ids")
    size = service.info.vocab_size
    for token_id in value:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise bad_request(param, f"{param} holds something that is no token id")
        if not 0 <= token_id < size:
            raise bad_request(param, f"{param} has the token id {token_id}; ids go from 0 to {size - 1}")
    return Prompt(tuple(value))


def make_jobs(
    prompts: Sequence[Prompt],
    options: Options,
    service: ModelService,
    *,
    logprobs: int | None = None,
    prompt_logprobs: bool = False,
    is_scoring: bool = False,
) -> list[Job]:
    """Return one job for each prompt and choice; choice i of every prompt draws from stream i of the seed.

    Raises:
        ContextOverflowError: a prompt leaves no room.
    """
    stop_ids = set(options.stop_token_ids)
    if not (options.ignore_eos or is_scoring):
        stop_ids |= service.tokenizer.eos_ids
    jobs: list[Job] = []
    for prompt in prompts:
        count = len(prompt.token_ids)
        service.check_fits(count, needs_room=options.max_tokens != 0)
        for sample in range(options.n):
            params = m.GenerateParams(
                token_ids=list(prompt.token_ids),
                max_tokens=service.room_for(count, options.max_tokens),
                sampling=options.sampling.model_copy(update={"sample": sample}),
                stop_token_ids=sorted(stop_ids),
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            )
            jobs.append(Job(len(jobs), params, options.stops))
    return jobs


async def handle_completion(request: web.Request) -> web.StreamResponse:
    """Answer POST /v1/completions."""
    exchange = request.app[EXCHANGE]
    service = exchange.service
    fields = Fields(await read_json_object(request))
    wanted = parse_request(fields, service.info)
    options = wanted.options
    prompts = await parse_prompts(fields.raw("prompt"), service)
    scores_prompt = wanted.echo and wanted.logprobs is not None
    # A score's length must not depend on what the model would say next: with echo and logprobs
    # the one token asked for is returned even when it ends the text.
    jobs = make_jobs(
        prompts,
        options,
        service,
        logprobs=wanted.logprobs,
        prompt_logprobs=scores_prompt,
        is_scoring=scores_prompt and options.max_tokens == 1,
    )
    writer = _Writer(service, wanted, prompts)
    headers = exchange.headers(options.seed)
    with exchange.admission.admitted(len(jobs)) as slots:
        if options.stream:
            return await stream_events(request, writer.events(jobs, slots), headers=headers)
        answers = await collect_all(service, jobs, slots)
    return json_response(writer.whole(answers), headers=headers)


class _Writer:
    """Shapes the answers of one request."""

    def __init__(self, service: ModelService, wanted: CompletionRequest, prompts: Sequence[Prompt]) -> None:
        self._service = service
        self._wanted = wanted
        self._prompts = prompts
        self._head: dict[str, Any] = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.info.name,
            "system_fingerprint": None,
        }
        self._extensions = {"seed": wanted.options.seed, "vox": provenance(service.info)}

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        ends: list[AnswerEnd | None] = []
        for index, answer in enumerate(answers):
            assert answer.end is not None
            prefix, scored = self._echoed(index, answer.prompt_scores)
            ends.append(answer.end)
            choices.append(
                {
                    "index": index,
                    "text": prefix + answer.text,
                    "logprobs": self._logprobs([*scored, *answer.tokens], offset=0),
                    "finish_reason": answer.end.finish_reason,
                    "token_ids": [token.token_id for token in answer.tokens],
                }
            )
        return {**self._head, "choices": choices, "usage": self._usage(ends), **self._extensions}

    async def events(self, jobs: Sequence[Job], slots: Any) -> AsyncGenerator[dict[str, Any], None]:
        ends: list[AnswerEnd | None] = [None] * len(jobs)
        extensions: dict[str, Any] = self._extensions
        offsets = [0] * len(jobs)
        echoed = [not self._wanted.echo] * len(jobs)

        def chunk(index: int, text: str, tokens: Sequence[AnswerToken], finish: str | None) -> dict[str, Any]:
            nonlocal extensions
            logprobs = self._logprobs(tokens, offset=offsets[index]) if tokens else None
            offsets[index] += len(text)
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
            value = {**self._head, "choices": [choice], **extensions}
            extensions = {}
            return value

        async with contextlib.aclosing(stream_all(self._service, jobs, slots)) as items:
            async for index, item in items:
                if not echoed[index]:
                    echoed[index] = True
                    scores = item if isinstance(item, PromptScores) else None
                    prefix, scored = self._echoed(index, scores)
                    yield chunk(index, prefix, scored, None)
                match item:
                    case AnswerPiece():
                        yield chunk(index, item.text, item.tokens, None)
                    case AnswerEnd():
                        ends[index] = item
                        yield chunk(index, "", (), item.finish_reason)
        if self._wanted.options.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage(ends)}

    def _echoed(self, index: int, scores: PromptScores | None) -> tuple[str, list[AnswerToken]]:
        """Return what `echo` puts before an answer: the prompt's text and its scored tokens."""
        if not self._wanted.echo:
            return "", []
        prompt = self._prompts[index // self._wanted.options.n]
        texts = _token_texts(self._service, prompt.token_ids)
        text = "".join(texts) if prompt.text is None else prompt.text
        if self._wanted.logprobs is None:
            return text, []
        if scores is None or len(scores.tokens) != len(prompt.token_ids):
            raise ApiError(500, "the plugin returned no scores for the prompt", code="scores-missing")
        return text, prompt_tokens_of(scores.tokens, texts)

    def _logprobs(self, tokens: Sequence[AnswerToken], *, offset: int) -> dict[str, Any] | None:
        if self._wanted.logprobs is None:
            return None
        return completion_logprobs(tokens, self._service.tokenizer, self._wanted.logprobs, offset=offset)

    def _usage(self, ends: Sequence[AnswerEnd | None]) -> dict[str, Any]:
        """Count prompts once each, whatever the number of their choices, which stand side by side."""
        whole = [end for end in ends if end is not None]
        n = self._wanted.options.n
        cached = [cached_of_prompt(whole[i : i + n]) for i in range(0, len(whole), n)]
        generated = sum(end.generated_tokens for end in whole)
        return usage(sum(len(prompt.token_ids) for prompt in self._prompts), generated, cached)


def _token_texts(service: ModelService, token_ids: Sequence[int]) -> list[str]:
    stream: TextStream[int] = TextStream()
    pieces = [stream.push(service.tokenizer.text_bytes(t), t) for t in token_ids]
    pieces.append(stream.finish())
    return [token.text for piece in pieces for token in piece.tokens]
