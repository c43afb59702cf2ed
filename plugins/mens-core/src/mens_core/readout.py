"""What is asked of a step's logits, row by row, and what becomes of the answers: scores, digests, tokens.

Whatever is not finite is reported with the row it was found in, so that only its sequence fails.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mens_core.logprobs import score_token
from mens_core.sampling import draw, is_greedy, random_bits
from mens_core.sequence import Sequence
from mens_core.wishes import Penalty, Reading, Wish
from vox_plugin_api.messages import GeneratedToken

__all__ = ["Drawn", "LogitRow", "NonFinite", "not_finite", "take_readings"]


@dataclass(slots=True)
class LogitRow:
    """Row `index` of a step's logits: what `sequence` predicts after `position`. Nothing changes one."""

    index: int
    sequence: Sequence
    position: int

    @property
    def draws(self) -> bool:
        """Whether a token of the answer comes from it."""
        return self.position + 1 >= self.sequence.prompt_length and self.sequence.request.max_tokens > 0

    @property
    def scores_prompt(self) -> bool:
        """Whether it gives the logprob of the next token of the prompt."""
        wanted = self.sequence.request.prompt_logprobs is not None
        return wanted and self.position + 1 < self.sequence.prompt_length

    @property
    def is_digested(self) -> bool:
        return self.sequence.request.logits_digest and self.position < self.sequence.prompt_length

    @property
    def wish(self) -> Wish:
        """What is asked of it; penalties are those of now."""
        request, penalties = self.sequence.request, self.sequence.penalties
        is_scored = self.scores_prompt or self.is_digested
        if not self.draws:
            return Wish(self.index, is_scored)
        sampling = request.sampling
        is_scored = is_scored or request.logprobs is not None
        penalty = Penalty(*penalties.arrays()) if penalties.is_active else None
        if is_greedy(sampling):
            return Wish(self.index, is_scored, penalty, True)
        random = random_bits(sampling, self.position + 1)
        return Wish(
            self.index,
            is_scored,
            penalty,
            is_chosen=True,
            draw=lambda weights: draw(weights, sampling, random),
            temperature=sampling.temperature,
        )


class NonFinite(NamedTuple):
    """An operator's output was not finite in this row."""

    row: LogitRow
    operator: str


class Drawn(NamedTuple):
    """The next token of a sequence."""

    row: LogitRow
    token: GeneratedToken


def not_finite(read: Many[tuple[LogitRow, Reading]]) -> list[NonFinite]:
    """Return the rows that were not finite when they were read."""
    return [NonFinite(row, reading.fault) for row, reading in read if reading.fault is not None]


def take_readings(read: Many[tuple[LogitRow, Reading]]) -> list[Drawn]:
    """Score and digest the prompt's rows in their sequences, ascending in position; return what was drawn."""
    drawn = []
    for row, reading in read:
        if reading.logits is not None and reading.normaliser is not None:
            _score_prompt(row, reading.logits, reading.normaliser)
        if reading.token_id is not None:
            drawn.append(Drawn(row, _with_score(row, reading, reading.token_id)))
    return drawn


def _score_prompt(row: LogitRow, values: npt.NDArray[np.float32], normaliser: np.float32) -> None:
    sequence, top = row.sequence, row.sequence.request.prompt_logprobs
    if row.is_digested:
        sequence.digest.update(np.ascontiguousarray(values, dtype="<f4").tobytes())
    if row.scores_prompt and top is not None:
        sequence.prompt_scores.append(score_token(values, normaliser, sequence.tokens[row.position + 1], top))


def _with_score(row: LogitRow, reading: Reading, token_id: int) -> GeneratedToken:
    top = row.sequence.request.logprobs
    if top is None or reading.logits is None or reading.normaliser is None:
        return GeneratedToken(token_id=token_id)
    return score_token(reading.logits, reading.normaliser, token_id, top)
