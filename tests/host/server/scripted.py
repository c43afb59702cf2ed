"""A model service without a model: a scripted engine that speaks the worker's messages.

It is a small real engine: it streams, honours cancellation, counts what it was asked, and fails
on command. Its tokenizer is byte-level over a tiny vocabulary unless a test brings another.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from vox_host.app.service import EngineHealth, ModelInfo, ModelService
from vox_host.chat.template import ChatTemplate
from vox_host.errors import WorkerFailedError
from vox_host.models.tokenizer import ChatTemplateSource, Tokenizer, _byte_level_alphabet
from vox_plugin_api import messages as m

CASES = Path(__file__).parents[2] / "cases"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259


def cases(kind: str, *ids: str) -> list[dict]:
    """Entries of the cases' index."""
    return [c for c in json.loads((CASES / "INDEX.json").read_text()) if c["kind"] == kind and c["id"] in ids]


def byte_tokenizer(*, bos: bool = True) -> Tokenizer:
    """One token per byte, plus four special ones: ids 0-255 are the bytes themselves."""
    alphabet = sorted(_byte_level_alphabet().items(), key=lambda item: item[1])
    vocab = {character: byte for character, byte in alphabet}
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in ("<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    )
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return Tokenizer(
        core,
        bos_id=BOS if bos else None,
        eos_ids=frozenset({EOS, IM_END}),
        special_names={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template=ChatTemplateSource(CHATML, "tokenizer_config.json"),
    )


@dataclass
class ScriptedEngine:
    """Answers with the tokens of `script`, one event per element; a tuple is one event's tokens."""

    script: Sequence[int | tuple[int, ...]] | Callable[[m.GenerateParams], Sequence[int]] = ()
    finish: str = "stop"
    delay_s: float = 0.0
    fail_after: int | None = None
    """Die after so many events."""
    logprobs: Sequence[float] = (-0.5, -1.25, -3.5)
    is_ready: bool = True
    requests: list[m.GenerateParams] = field(default_factory=list)
    cancelled: int = 0
    running: int = 0
    most_running: int = 0
    produced: int = 0

    def health(self) -> EngineHealth:
        return EngineHealth(self.is_ready, "ready" if self.is_ready else "restarting", None)

    async def generate(self, params: m.GenerateParams) -> AsyncGenerator[m.GenerateResult, None]:
        self.requests.append(params)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        is_finished = False
        try:
            script = self.script(params) if callable(self.script) else self.script
            prompt = None
            if params.prompt_logprobs:
                prompt = [self._token(t, params, n, scored=n > 0) for n, t in enumerate(params.token_ids)]
            if prompt is not None:
                yield m.GenerateResult(prompt=prompt)
            count = 0
            finish, stop_token = "length", None
            for events, step in enumerate(script):
                if self.fail_after is not None and events >= self.fail_after:
                    raise WorkerFailedError("worker-died", "the worker died: signal 9 (SIGKILL)")
                await asyncio.sleep(self.delay_s)
                tokens = []
                for token in step if isinstance(step, tuple) else (step,):
                    if count >= params.max_tokens:
                        break
                    count += 1
                    if token in params.stop_token_ids:
                        finish, stop_token = "stop", token
                        break
                    tokens.append(self._token(token, params, count))
                self.produced += len(tokens)
                if tokens:
                    yield m.GenerateResult(tokens=tokens)
                if stop_token is not None or count >= params.max_tokens:
                    break
            else:
                finish = self.finish
            is_finished = True
            yield m.GenerateResult(
                finish_reason=finish,
                stop_token_id=stop_token,
                prompt_tokens=len(params.token_ids),
                generated_tokens=count,
            )
        finally:
            self.running -= 1
            if not is_finished:
                self.cancelled += 1

    def _token(self, token: int, params: m.GenerateParams, position: int, scored: bool = True) -> m.GeneratedToken:
        if not scored or params.logprobs is None:
            return m.GeneratedToken(token_id=token)
        values = list(self.logprobs)
        others = [m.TokenLogprob(token_id=(token + n) % 256, logprob=v) for n, v in enumerate(values)]
        return m.GeneratedToken(token_id=token, logprob=values[0], top=others[: params.logprobs])


def drawn(params: m.GenerateParams) -> list[int]:
    """Letters that depend on seed and sample alone, as sampling does; at temperature 0 on neither."""
    sampling = params.sampling
    key = (0, 0) if sampling.temperature == 0 else (sampling.seed, sampling.sample)
    digest = hashlib.sha256(repr(key).encode()).digest()
    return [97 + byte % 26 for byte in digest]


def model_info(**changes: object) -> ModelInfo:
    values: dict = dict(
        name="m",
        digest="0" * 64,
        plugin_id="scripted",
        plugin_version="1.0.0",
        lane="cpu",
        numerics="canonical",
        context_length=512,
        model_context_length=2048,
        vocab_size=260,
        created=1,
    )
    return ModelInfo(**{**values, **changes})


def make_service(
    engine: ScriptedEngine | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    template: str | None = CHATML,
    info: ModelInfo | None = None,
) -> ModelService:
    tokenizer = tokenizer or byte_tokenizer()
    chat = None
    if template is not None:
        chat = ChatTemplate(
            template, name="m", special_tokens=tokenizer.special_names, protect=tokenizer.special_tokens
        )
    return ModelService(info or model_info(), tokenizer, chat, engine or ScriptedEngine(text("hello")))


def text(words: str) -> list[int]:
    """The byte tokenizer's ids of `words`, without BOS."""
    return list(words.encode())


NO_LOGPROB = -math.inf
