"""What becomes of a sequence's tokens and scores on their way to the host.

An answer submits its sequences, and hands out one reply at a time: one token each, however many
are ready, so that what an answer consists of does not depend on who else was served.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from mens_core.engine import Engine
from mens_core.sequence import Sequence, SequenceRequest
from vox_plugin_api import messages as m
from vox_plugin_api.backend import BackendError, Reply, Stream

__all__ = ["Answer", "Evaluation", "Generation", "serve"]

_EVALUATED_TOGETHER = 8
"""Sequences of one evaluation in the engine at once; other requests get in between."""


class Answer(Protocol):
    """A request in service."""

    is_complete: bool

    def next_reply(self) -> Reply | None:
        """Return what is ready, or None; raise what the sequence failed with."""
        ...

    def cancel(self) -> None:
        """Take what is unfinished out of the engine."""
        ...


def serve(engine: Engine, answer: Answer) -> Stream:
    """Yield an answer's replies, and None for each turn that had none.

    The engine steps when an answer that is asked has nothing and no step has run since it was
    last asked. So a loop that takes turns between answers runs one step a round, shared by all;
    and an answer alone, while the others are left lying, goes on all the same.
    """
    try:
        seen = engine.steps
        yield None
        while not answer.is_complete:
            reply = answer.next_reply()
            if reply is None and engine.steps == seen:
                engine.step()
                reply = answer.next_reply()
            seen = engine.steps
            yield reply
    finally:
        answer.cancel()


class Generation:
    """The answer to `generate`: the prompt's scores if wanted, tokens, and how it ended."""

    def __init__(self, engine: Engine, params: m.GenerateParams) -> None:
        self.is_complete = False
        self._engine = engine
        self._started = time.perf_counter()
        self._first_token_s: float | None = None
        self._owes_prompt = params.prompt_logprobs
        self._sequence = engine.submit(
            SequenceRequest(
                token_ids=tuple(params.token_ids),
                max_tokens=params.max_tokens,
                sampling=params.sampling,
                stop_token_ids=frozenset(params.stop_token_ids),
                logprobs=params.logprobs,
                prompt_logprobs=(params.logprobs or 0) if params.prompt_logprobs else None,
            )
        )

    def next_reply(self) -> Reply | None:
        sequence = self._sequence
        if self._owes_prompt and sequence.prompt_is_scored:
            self._owes_prompt = False
            return Reply(m.GenerateResult(prompt=_scored_prompt(sequence)))
        if sequence.ready:
            observed: dict[str, Any] = {}
            if self._first_token_s is None:
                self._first_token_s = time.perf_counter() - self._started
                # Already now: who stops reading at some text never sees the end.
                observed["cached_tokens"] = sequence.reused
            return Reply(m.GenerateResult(tokens=[sequence.ready.popleft()]), observed)
        if sequence.failure is not None:
            raise sequence.failure
        return self._ending() if sequence.is_done else None

    def _ending(self) -> Reply:
        self.is_complete = True
        sequence = self._sequence
        result = m.GenerateResult(
            finish_reason=sequence.finish_reason,
            stop_token_id=sequence.stop_token_id,
            prompt_tokens=sequence.prompt_length,
            generated_tokens=sequence.generated,
        )
        total_s = time.perf_counter() - self._started
        observed = {
            "first_token_s": self._first_token_s,
            "total_s": total_s,
            "cached_tokens": sequence.reused,
        }
        return Reply(result, observed)

    def cancel(self) -> None:
        self._engine.cancel(self._sequence)


class Evaluation:
    """The answer to `evaluate`: one result per sequence, in order."""

    def __init__(self, engine: Engine, params: m.EvaluateParams) -> None:
        self.is_complete = False
        self._engine = engine
        self._index = 0
        self._digests = params.logits_digest
        self._submitted: deque[Sequence] = deque()
        self._waiting = deque(
            SequenceRequest(
                token_ids=tuple(token_ids),
                max_tokens=0,
                prompt_logprobs=params.top_logprobs,
                logits_digest=params.logits_digest,
            )
            for token_ids in params.sequences
        )
        for index, request in enumerate(self._waiting):
            with _naming_sequence(index):
                engine.check(request)

    def next_reply(self) -> Reply | None:
        while self._waiting and len(self._submitted) < _EVALUATED_TOGETHER:
            self._submitted.append(self._engine.submit(self._waiting.popleft()))
        sequence = self._submitted[0]
        if sequence.failure is not None:
            with _naming_sequence(self._index):
                raise sequence.failure
        if not sequence.is_done:
            return None
        self._submitted.popleft()
        result = m.EvaluateResult(
            index=self._index,
            tokens=_scored_prompt(sequence),
            logits_digest=sequence.digest.hexdigest() if self._digests else None,
        )
        self._index += 1
        self.is_complete = not (self._submitted or self._waiting)
        return Reply(result)

    def cancel(self) -> None:
        for sequence in self._submitted:
            self._engine.cancel(sequence)


def _scored_prompt(sequence: Sequence) -> list[m.GeneratedToken]:
    """Every token of the prompt; nothing comes before the first, so it has no logprob."""
    return [m.GeneratedToken(token_id=sequence.tokens[0]), *sequence.prompt_scores]


@contextmanager
def _naming_sequence(index: int) -> Iterator[None]:
    try:
        yield
    except BackendError as error:
        found = error.error
        raise BackendError(
            found.code,
            f"sequence {index}: {found.message}",
            facts={"index": index, **found.facts},
            remedy=found.remedy,
        ) from error
