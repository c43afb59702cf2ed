"""One request inside the engine: what it asked for and how far it is."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, field

from mens_core.kv_blocks import Reservation
from mens_core.sampling import Penalties
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import FinishReason, GeneratedToken, SamplingParams

__all__ = ["BACKLOG", "Sequence", "SequenceRequest"]

BACKLOG = 8
"""Tokens that may wait for their consumer before the sequence sits out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRequest:
    """What one sequence asks of the engine."""

    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    """With each token its logprob and this many alternatives; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, the first excepted."""
    logits_digest: bool = False
    """Whether to digest the logits of every position of the prompt."""

    @property
    def positions(self) -> int:
        """Positions that are ever written: the last token of an answer is not."""
        return len(self.token_ids) + max(self.max_tokens - 1, 0)

    @property
    def scores_prompt(self) -> bool:
        """Whether logits are wanted at every position of the prompt."""
        return self.logits_digest or self.prompt_logprobs is not None

    @property
    def reusable(self) -> int:
        """How many positions of the prompt need not be computed where they are known: none has its logits
        wanted, and the last is never among them."""
        return 0 if self.scores_prompt else len(self.token_ids) - 1


class Sequence:
    """The state of one request: waiting, running, or done (finished, failed, cancelled)."""

    def __init__(self, request: SequenceRequest) -> None:
        self.request = request
        self.prompt_length = len(request.token_ids)
        self.tokens = list(request.token_ids)
        """Prompt and answer."""
        self.cached = 0
        """How many of `tokens` are in the KV cache."""
        self.reused = 0
        """How many of those others had put there."""
        self.generated = 0
        """Tokens drawn, a stop token included."""
        self.penalties = Penalties(request.sampling, request.token_ids)
        self.blocks: Reservation | None = None
        """None before admission and after the end."""
        self.ready: deque[GeneratedToken] = deque()
        """Tokens nobody has taken yet."""
        self.prompt_scores: list[GeneratedToken] = []
        self.digest = hashlib.sha256()
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.failure: BackendError | None = None
        self.is_cancelled = False

    @property
    def is_done(self) -> bool:
        return self.finish_reason is not None or self.failure is not None or self.is_cancelled

    @property
    def prompt_is_cached(self) -> bool:
        return self.cached >= self.prompt_length

    @property
    def prompt_is_scored(self) -> bool:
        """Whether `prompt_scores` is complete, whatever happened afterwards."""
        return self.generated > 0 or (self.prompt_is_cached and self.failure is None)

    @property
    def is_paused(self) -> bool:
        """Whether its consumer is so far behind that it gets no more tokens for now."""
        return len(self.ready) >= BACKLOG

    def wants_logits(self, position: int) -> bool:
        """Whether the logits at `position` are needed: to score, to digest or to draw."""
        last = self.prompt_length - 1
        if position < last:
            return self.request.scores_prompt
        return self.request.max_tokens > 0 or (self.request.logits_digest and position == last)
