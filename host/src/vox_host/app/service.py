"""One model, ready to answer: the seam between callers (HTTP, command line) and a worker.

`Engine` is all that is asked of a worker. `ModelService` puts tokenizer and chat template
around it and turns tokens into text; it knows no HTTP and prints nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from vox_host.app.model_info import ModelInfo
from vox_host.chat.text_stream import TextStream
from vox_host.errors import ModelError, UsageError, VoxError
from vox_host.models.tokenizer import PromptTooLong, Tokenizer
from vox_plugin_api import messages as m

if TYPE_CHECKING:
    from vox_host.chat.template import ChatTemplate

__all__ = [
    "Answer",
    "AnswerEnd",
    "AnswerPiece",
    "AnswerToken",
    "ContextOverflowError",
    "Engine",
    "EngineEvent",
    "EngineHealth",
    "ModelInfo",
    "ModelService",
    "PromptScores",
    "draw_seed",
]


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Whether requests can be answered now."""

    is_ready: bool
    state: str
    """One word: ready, starting, restarting, failed, stopped."""
    detail: str | None = None


class EngineEvent(NamedTuple):
    """A piece of an answer, and what was observed on the way."""

    result: m.GenerateResult
    cached_tokens: int | None = None
    """Tokens at the start of the prompt that earlier requests had computed; None: not said, or not yet."""


class Engine(Protocol):
    """A worker with a loaded model."""

    def generate(self, params: m.GenerateParams) -> AsyncGenerator[EngineEvent, None]:
        """Stream an answer; closing the iterator cancels it."""
        ...

    def health(self) -> EngineHealth:
        """Say whether it answers now."""
        ...


class ContextOverflowError(UsageError):
    """The prompt does not fit the context."""

    def __init__(
        self, prompt_tokens: int, context_length: int, *, is_estimate: bool, model_context_length: int
    ) -> None:
        about = "about " if is_estimate else ""
        tokens = "token" if prompt_tokens == 1 else "tokens"
        super().__init__(
            "context_length_exceeded",
            f"the prompt has {about}{prompt_tokens} {tokens} and the context of this model holds "
            f"{context_length}, with room for at least one token of the answer; nothing was generated",
            facts=[("prompt_tokens", prompt_tokens), ("context_length", context_length)],
            remedy="Shorten the prompt: the model was made for no longer context."
            if context_length >= model_context_length
            else "Shorten the prompt, or serve with a larger --context-length, up to the model's "
            f"{model_context_length}; where the memory for keys and values bounds it, --kv-cache-mib.",
        )


class AnswerToken(NamedTuple):
    """A token of an answer. The texts of all of them join to the answer's text."""

    token_id: int
    text: str
    logprob: float | None = None
    top: tuple[m.TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptScores:
    """Every prompt token with its logprob; the first has none."""

    tokens: tuple[m.GeneratedToken, ...]


class AnswerPiece(NamedTuple):
    """Text that can be shown now."""

    text: str
    tokens: tuple[AnswerToken, ...] = ()


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The last item of an answer."""

    finish_reason: Literal["stop", "length"]
    prompt_tokens: int
    generated_tokens: int
    """Tokens the model produced, those cut off by a stop string included."""
    stopped_by: str | None = None
    cached_tokens: int | None = None
    """Of the prompt, those that were not computed again; None: the worker said nothing of it."""


@dataclass(slots=True)
class Answer:
    """A whole answer, collected."""

    text: str = ""
    tokens: list[AnswerToken] = field(default_factory=list)
    prompt_scores: PromptScores | None = None
    end: AnswerEnd | None = None


def draw_seed() -> int:
    """Return a fresh seed; 53 bits, so that every JSON reader can send it back unchanged."""
    return secrets.randbits(53)


class ModelService:
    """Answers requests with one model."""

    def __init__(
        self, info: ModelInfo, tokenizer: Tokenizer, template: ChatTemplate | None, engine: Engine
    ) -> None:
        self.info = info
        self.tokenizer = tokenizer
        self._template = template
        self._engine = engine

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be turned into prompts."""
        return self._template is not None

    def health(self) -> EngineHealth:
        """Say whether requests can be answered now."""
        return self._engine.health()

    async def encode_prompt(self, text: str) -> list[int]:
        """Return the token ids of a completion's prompt.

        Raises:
            ContextOverflowError: it leaves no room for an answer.
        """
        ids: list[int] = await self._within_context(self.tokenizer.encode, text)
        return ids

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[Any] | None = None,
        variables: dict[str, Any] | None = None,
    ) -> list[int]:
        """Return the token ids of a conversation, ready for the assistant's turn.

        Raises:
            ModelError: the model has no chat template.
            UsageError: the template refused the conversation.
            ContextOverflowError: it leaves no room for an answer.
        """
        template = self._template
        if template is None:
            raise ModelError(
                "no-chat-template",
                f'the model "{self.info.name}" has no chat template: a base model continues text',
                remedy="Use /v1/completions (or `vox-host generate`) with a prompt.",
            )
        # What can't fit by itself is not rendered first; templates write messages whole.
        for message in messages:
            await self._within_context(self.tokenizer.check_length, message["content"])
        rendered = await asyncio.to_thread(template.render, messages, tools=tools, variables=variables)
        ids: list[int] = await self._within_context(
            self.tokenizer.encode_markup, rendered.text, rendered.positions
        )
        return ids

    def check_fits(self, prompt_tokens: int, *, needs_room: bool = True) -> None:
        """Refuse a prompt that leaves no room.

        Raises:
            ContextOverflowError: it does not fit.
        """
        if prompt_tokens > self.info.context_length - int(needs_room):
            raise self._overflow(prompt_tokens, is_estimate=False)

    def _overflow(self, prompt_tokens: int, *, is_estimate: bool) -> ContextOverflowError:
        return ContextOverflowError(
            prompt_tokens,
            self.info.context_length,
            is_estimate=is_estimate,
            model_context_length=self.info.model_context_length,
        )

    def room_for(self, prompt_tokens: int, max_tokens: int | None) -> int:
        """Return how many tokens an answer may have: what was asked for, within the context."""
        room = max(0, self.info.context_length - prompt_tokens)
        return room if max_tokens is None else min(max_tokens, room)

    async def answer(
        self, params: m.GenerateParams, stops: Sequence[str] = ()
    ) -> AsyncGenerator[PromptScores | AnswerPiece | AnswerEnd, None]:
        """Stream an answer: scores of the prompt if asked for, pieces of text, one end.

        A stop string ends it at once and cancels the rest; so does closing the iterator.
        """
        text: TextStream[m.GeneratedToken] = TextStream(stops)
        seen, cached = 0, None
        prompt = len(params.token_ids)
        async with contextlib.aclosing(self._engine.generate(params)) as events:
            async for event in events:
                result = event.result
                cached = cached if event.cached_tokens is None else event.cached_tokens
                if result.prompt is not None:
                    yield PromptScores(tuple(result.prompt))
                ready: list[AnswerPiece] = []
                for token in result.tokens:
                    seen += 1
                    piece = text.push(self.tokenizer.text_bytes(token.token_id), token)
                    ready.append(_answer_piece(piece.text, piece.tokens))
                    if text.stopped_by is not None:
                        break
                if (joined := _joined(ready)) is not None:
                    yield joined
                if text.stopped_by is not None:
                    yield AnswerEnd("stop", prompt, seen, text.stopped_by, cached)
                    return
                if result.finish_reason is not None:
                    rest = text.finish()
                    if rest.text or rest.tokens:
                        yield _answer_piece(rest.text, rest.tokens)
                    if text.stopped_by is not None:
                        yield AnswerEnd("stop", prompt, seen, text.stopped_by, cached)
                    else:
                        generated = result.generated_tokens
                        made = seen if generated is None else generated
                        yield AnswerEnd(result.finish_reason, prompt, made, None, cached)
                    return
        raise VoxError("answer-incomplete", "the worker ended an answer without a finish reason")

    async def collect(self, params: m.GenerateParams, stops: Sequence[str] = ()) -> Answer:
        """Return a whole answer."""
        whole = Answer()
        texts: list[str] = []
        async with contextlib.aclosing(self.answer(params, stops)) as items:
            async for item in items:
                match item:
                    case AnswerPiece():
                        texts.append(item.text)
                        whole.tokens.extend(item.tokens)
                    case PromptScores():
                        whole.prompt_scores = item
                    case AnswerEnd():
                        whole.end = item
        whole.text = "".join(texts)
        return whole

    async def _within_context(self, encode: Any, *arguments: Any) -> Any:
        limit = self.info.context_length
        try:
            return await asyncio.to_thread(encode, *arguments, limit=limit)
        except PromptTooLong as finding:
            raise self._overflow(finding.tokens, is_estimate=finding.is_estimate) from None


def _answer_piece(text: str, tokens: Sequence[Any]) -> AnswerPiece:
    made = [AnswerToken(t.entry.token_id, t.text, t.entry.logprob, tuple(t.entry.top)) for t in tokens]
    return AnswerPiece(text, tuple(made))


def _joined(pieces: list[AnswerPiece]) -> AnswerPiece | None:
    if len(pieces) == 1:  # nearly always: a worker of ours sends token by token
        return pieces[0] if pieces[0].text or pieces[0].tokens else None
    text = "".join(piece.text for piece in pieces)
    tokens = tuple(token for piece in pieces for token in piece.tokens)
    return AnswerPiece(text, tokens) if text or tokens else None
