"""Turn a step's logits into scores, digests and drawn tokens.

Scores and digests come first: penalties change the logits in place. Whatever is not finite is
reported with the row it was found in, so that only its sequence fails.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mens_core.logprobs import score_token
from mens_core.ops import Ops, Tensor
from mens_core.sampling import draw, is_greedy, random_bits
from mens_core.sequence import Sequence
from vox_plugin_api.messages import GeneratedToken

__all__ = ["Drawn", "LogitRow", "NonFinite", "Scores", "draw_tokens", "read_scores"]


@dataclass(frozen=True, slots=True)
class LogitRow:
    """Row `index` of a step's logits: what `sequence` predicts after `position`."""

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
    def scores_answer(self) -> bool:
        return self.draws and self.sequence.request.logprobs is not None


@dataclass(frozen=True, slots=True)
class NonFinite:
    """An operator's output was not finite in this row."""

    row: LogitRow
    operator: str


@dataclass(frozen=True, slots=True)
class Scores:
    """A row's logits as the model made them, and their log-normaliser."""

    logits: npt.NDArray[np.float32]
    normaliser: np.float32


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of a sequence."""

    row: LogitRow
    token: GeneratedToken


def read_scores(
    ops: Ops, logits: Tensor, rows: Iterable[LogitRow]
) -> tuple[dict[int, Scores], list[NonFinite]]:
    """Digest and score the prompt's rows in their sequences, ascending in position.

    Returns:
        For the rows that draw with logprobs, by index, what those are made from; and the rows
        that are not finite, which were not scored.
    """
    read = [row for row in rows if row.scores_prompt or row.is_digested or row.scores_answer]
    if not read:
        return {}, []
    chosen = ops.take_rows(logits, np.array([row.index for row in read], np.int32))
    normalisers = ops.log_normaliser(chosen)
    faults = [NonFinite(read[i], fault.name) for fault in ops.take_faults() for i in fault.rows]
    spoiled = {fault.row.sequence for fault in faults}
    kept: dict[int, Scores] = {}
    for row, values, normaliser in zip(read, ops.to_host(chosen), normalisers, strict=True):
        if row.sequence in spoiled:
            continue
        _score_prompt(row, values, normaliser)
        if row.scores_answer:
            # A copy: a lane's rows may be views of what penalties are about to change.
            kept[row.index] = Scores(values.copy(), normaliser)
    return kept, faults


def _score_prompt(row: LogitRow, values: npt.NDArray[np.float32], normaliser: np.float32) -> None:
    sequence, top = row.sequence, row.sequence.request.prompt_logprobs
    if row.is_digested:
        sequence.digest.update(np.ascontiguousarray(values, dtype="<f4").tobytes())
    if row.scores_prompt and top is not None:
        sequence.prompt_scores.append(score_token(values, normaliser, sequence.tokens[row.position + 1], top))


def draw_tokens(
    ops: Ops, logits: Tensor, rows: Iterable[LogitRow], scores: dict[int, Scores]
) -> tuple[list[Drawn], list[NonFinite]]:
    """Penalise (in place) and draw one token for each row that draws."""
    drawn: list[Drawn] = []
    faults: list[NonFinite] = []
    greedy: list[LogitRow] = []
    for row in rows:
        if not row.draws:
            continue
        found = _penalise(ops, logits, row)
        if found:
            faults += found
        elif is_greedy(row.sequence.request.sampling):
            greedy.append(row)
        else:
            drawn.append(_with_score(row, _sample(ops, logits, row), scores))
    if greedy:
        highest = ops.argmax(logits)
        drawn += [_with_score(row, int(highest[row.index]), scores) for row in greedy]
    return drawn, faults


def _penalise(ops: Ops, logits: Tensor, row: LogitRow) -> list[NonFinite]:
    if not row.sequence.penalties.is_active:
        return []
    token_ids, repetition, subtract = row.sequence.penalties.arrays()
    ops.penalise(logits, row.index, token_ids, repetition=repetition, subtract=subtract)
    return [NonFinite(row, fault.name) for fault in ops.take_faults()]


def _sample(ops: Ops, logits: Tensor, row: LogitRow) -> int:
    params = row.sequence.request.sampling
    weights = ops.token_weights(logits, row.index, params.temperature)
    return draw(weights, params, random_bits(params, row.position + 1))


def _with_score(row: LogitRow, token_id: int, scores: dict[int, Scores]) -> Drawn:
    top, read = row.sequence.request.logprobs, scores.get(row.index)
    if top is None or read is None:
        return Drawn(row, GeneratedToken(token_id=token_id))
    return Drawn(row, score_token(read.logits, read.normaliser, token_id, top))
