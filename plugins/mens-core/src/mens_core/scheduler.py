"""Decide which rows the next step computes. Owns no tensors.

Every running sequence with a token to feed gets its one decode row; what is left of the
step's budget goes to prompts, in the order in which they were admitted. So answers in
progress never wait for a long prompt, which is read in chunks beside them. No choice made here
can change a byte: the operators' sums do not depend on what else is in the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mens_core.sequence import Sequence

__all__ = ["Slice", "StepLimits", "plan_step"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLimits:
    """How much one step may hold. Speed and memory depend on it, bytes don't."""

    rows: int = 256
    """Rows of one step; decode rows come first and may exceed it."""
    least_prefill_rows: int = 16
    """Prompt rows a step takes even when decode rows used up the budget."""
    scored_rows: int = 16
    """Prompt rows whose logits are wanted; each is a vocabulary long."""


@dataclass(slots=True)
class Slice:
    """Rows of one sequence in a step: positions [start, start + count).

    Nothing changes one. It is not frozen, since one is made for every row of every step, and to make a frozen
    one takes three times as long; so are the other records of a step.
    """

    sequence: Sequence
    start: int
    count: int


def plan_step(running: Iterable[Sequence], limits: StepLimits) -> list[Slice]:
    """Return the step's slices, decode rows first; empty when nobody can go on."""
    decode: list[Slice] = []
    prompts: list[Sequence] = []
    for sequence in running:
        if sequence.is_done or sequence.is_paused:
            continue
        if sequence.prompt_is_cached:
            decode.append(Slice(sequence, sequence.cached, 1))
        else:
            prompts.append(sequence)
    return decode + _prefill(
        prompts, max(limits.rows - len(decode), limits.least_prefill_rows), limits.scored_rows
    )


def _prefill(prompts: list[Sequence], rows: int, scored_rows: int) -> list[Slice]:
    slices: list[Slice] = []
    for sequence in prompts:
        count = min(rows, sequence.prompt_length - sequence.cached)
        # The last row of a prompt draws a token like a decode row; only those before it are scored.
        is_scored = sequence.prompt_length > 1 and sequence.wants_logits(0)
        if is_scored:
            count = min(count, scored_rows)
            scored_rows -= count
        if count:
            slices.append(Slice(sequence, sequence.cached, count))
            rows -= count
    return slices
