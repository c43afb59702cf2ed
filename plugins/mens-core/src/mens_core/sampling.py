"""Choose the next token from integer weights.

Everything here is exact: the lane turns logits into integers (`Ops.token_weights`), and from
there on only integers are compared, added and multiplied, so every lane draws the same token.
The rules, one by one, are in docs/numerics.md, section 11. Penalties work on the logits before
that, through `Ops.penalise`; this module only says which tokens and how much.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from mens_core.ops import Ints
from mens_core.philox import STREAM_SAMPLING, uniform_u64
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import SamplingParams

__all__ = ["Penalties", "check_sampling", "draw", "flush_to_zero", "is_greedy", "keep", "random_bits"]

Weights = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

SMALLEST_NORMAL = 2.0**-126

_GROUP = 512
_SORTABLE = 4096
"""As many weights as are sorted outright; more are narrowed by value first."""

_LEVELS = (1 << 24, 1 << 14, 1)
"""How great a weight must be to be looked at first, then, and at last; the greatest is 2^32."""


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Refuse parameters that no draw is defined for.

    Raises:
        BackendError: `invalid-sampling`, naming each field with what was found and what may be.
    """
    problems = {
        name: f"{getattr(params, name)!r}; {rule}"
        for name, rule, is_right in (
            ("temperature", "0 or a positive number", lambda x: x >= 0),
            ("top_p", "from 0 to 1", lambda x: 0 <= x <= 1),
            ("min_p", "from 0 to 1", lambda x: 0 <= x <= 1),
            ("repetition_penalty", "a positive number", lambda x: x >= SMALLEST_NORMAL),
            ("presence_penalty", "a number", lambda x: True),
            ("frequency_penalty", "a number", lambda x: True),
            ("sample", "below 2^32", lambda x: x < 1 << 32),
        )
        if not _is_right(getattr(params, name), is_right)
    }
    for token_id, bias in params.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            problems[f"logit_bias[{token_id}]"] = f"token ids are 0 to {vocab_size - 1}"
        elif not math.isfinite(bias):
            problems[f"logit_bias[{token_id}]"] = f"{bias!r}; a finite number"
    if problems:
        named = ", ".join(problems)
        raise BackendError(
            "invalid-sampling",
            f"sampling parameters are out of range: {named}; nothing was generated",
            facts=problems,
        )


def _is_right(value: float, rule: Callable[[float], bool]) -> bool:
    return math.isfinite(value) and rule(value)


def is_greedy(params: SamplingParams) -> bool:
    """Whether the token is the argmax; a temperature that flushes to zero is zero."""
    return params.temperature < SMALLEST_NORMAL


def random_bits(params: SamplingParams, position: int) -> int:
    """Return the 64 random bits that draw the token at absolute `position`."""
    return uniform_u64(params.seed, (position, params.sample, STREAM_SAMPLING, 0))


# --- penalties -------------------------------------------------------------------------------


def flush_to_zero(x: Floats) -> Floats:
    """Return `x` with subnormals replaced by zeros of their sign."""
    return np.where(np.abs(x) < np.float32(SMALLEST_NORMAL), np.copysign(np.float32(0), x), x)


class Penalties:
    """What one sequence's penalties do to its next logits.

    Repetition counts tokens of prompt and answer, presence and frequency those of the answer.
    """

    def __init__(self, params: SamplingParams, prompt: Iterable[int]) -> None:
        self._repetition, self._presence, self._frequency = flush_to_zero(
            np.array(
                [params.repetition_penalty, params.presence_penalty, params.frequency_penalty], np.float32
            )
        )
        self._bias_ids = np.array(sorted(params.logit_bias), np.int64)
        biases = np.array([params.logit_bias[int(token_id)] for token_id in self._bias_ids], np.float32)
        self._biases = flush_to_zero(biases)
        self._repeats = bool(self._repetition != 1)
        self._counts_answer = bool(self._presence != 0 or self._frequency != 0)
        self._prompt_ids = (
            np.unique(np.fromiter(prompt, np.int64)) if self._repeats else np.empty(0, np.int64)
        )
        self._answer: Counter[int] = Counter()
        self.is_active = self._repeats or self._counts_answer or bool(self._bias_ids.size)
        self._made: tuple[Ids, Floats, Floats] | None = None
        """What `arrays` returned last: a long prompt is sorted once, not for every token after it."""
        self._noted: set[int] = set()
        """Tokens counted since then."""

    def note(self, token_id: int) -> None:
        """Count a token of the answer, where that will be asked for."""
        if self._repeats or self._counts_answer:
            self._answer[token_id] += 1
            self._noted.add(token_id)

    def arrays(self) -> tuple[Ints, Floats, Floats]:
        """Return ids (ascending, each once), their divisors and what is subtracted from each.

        ``subtract = fl(fl(fl(frequency * count) + presence) - bias)``, the first two only for
        tokens of the answer, the last only for biased ones.
        """
        if self._made is None:
            known = np.unique(np.concatenate([self._prompt_ids, self._bias_ids]))
            self._made = known, np.ones(known.size, np.float32), np.zeros(known.size, np.float32)
            self._made[1][np.searchsorted(known, self._prompt_ids)] = self._repetition
            self._made[2][np.searchsorted(known, self._bias_ids)] = flush_to_zero(0 - self._biases)
        if self._noted:
            self._made = self._counted(*self._made, np.array(sorted(self._noted), np.int64))
            self._noted.clear()
        ids, repetition, subtract = self._made
        return ids.astype(np.int32), repetition.copy(), subtract.copy()

    def _counted(
        self, ids: Ids, repetition: Floats, subtract: Floats, noted: Ids
    ) -> tuple[Ids, Floats, Floats]:
        """Return the arrays with these tokens as often in the answer as they are now."""
        places = np.searchsorted(ids, noted)
        # One behind the last stands for a token above all of them.
        new = np.append(ids, -1)[places] != noted
        if new.any():
            at = places[new]
            ids = np.insert(ids, at, noted[new])
            repetition = np.insert(repetition, at, np.float32(1))
            subtract = np.insert(subtract, at, np.float32(0))
            places = np.searchsorted(ids, noted)
        counts = np.array([self._answer[int(token_id)] for token_id in noted], np.float32)
        by_frequency = flush_to_zero(self._frequency * counts)
        amounts = flush_to_zero(by_frequency + self._presence)
        if self._bias_ids.size:
            _, biased, bias = np.intersect1d(noted, self._bias_ids, assume_unique=True, return_indices=True)
            amounts[biased] = flush_to_zero(amounts[biased] - self._biases[bias])
        repetition[places] = self._repetition
        subtract[places] = amounts
        return ids, repetition, subtract


# --- filters and the draw ----------------------------------------------------------------------


def draw(weights: Weights, params: SamplingParams, random: int) -> int:
    """Return the token that 64 random bits choose.

    Args:
        weights: [V] of `Ops.token_weights`; the greatest is 2^32.
        random: 64 bits.

    Raises:
        ValueError: no weight is positive, which no lane may return.
    """
    ids, kept = keep(weights, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    # Sums of groups first, then those within one: a sum from term to term over all would take most of the
    # time of a draw. They are integers below 2^63: the same in any order.
    starts = np.arange(0, len(kept), _GROUP)
    before = np.cumsum(np.add.reduceat(kept, starts, dtype=np.uint64))
    total = int(before[-1])
    if total == 0:
        raise ValueError("every token has weight 0; the greatest must have 2^32")
    goal = random * total >> 64
    group = int(np.searchsorted(before, np.uint64(goal), side="right"))
    within = np.cumsum(kept[group * _GROUP : (group + 1) * _GROUP], dtype=np.uint64)
    left = goal - (int(before[group - 1]) if group else 0)
    chosen = group * _GROUP + int(np.searchsorted(within, np.uint64(left), side="right"))
    return chosen if ids is None else int(ids[chosen])


def keep(weights: Weights, *, top_k: int, top_p: float, min_p: float) -> tuple[Ids | None, Weights]:
    """Return ids (None: all) and weights that pass top-k, then top-p, then min-p, ids ascending.

    Tokens rank by weight, greatest first, the lower id first among equals. Top-k keeps the
    first k. Top-p keeps the shortest beginning of the rest whose sum reaches p times the
    rest's sum, at least one token. Min-p drops weights below p times the greatest.
    """
    ids: Ids | None = None
    if top_k:
        ids, weights = _cut(ids, weights, top_k, by_count=True)
    if top_p < 1:
        goal = max(1, _ceil_product(top_p, int(weights.sum(dtype=np.uint64))))
        ids, weights = _cut(ids, weights, goal, by_count=False)
    if min_p > 0:
        floor = _ceil_product(min_p, int(weights.max()))
        ids, weights = _select(ids, weights, np.flatnonzero(weights >= np.uint64(floor)))
    return ids, weights


def _ceil_product(share: float, total: int) -> int:
    """Return ceil(share * total) exactly: an integer reaches the product when it reaches this."""
    numerator, denominator = float(flush_to_zero(np.array(share, np.float32))).as_integer_ratio()
    return -(-numerator * total // denominator)


def _select(ids: Ids | None, weights: Weights, chosen: Ids) -> tuple[Ids, Weights]:
    return (chosen if ids is None else ids[chosen]), weights[chosen]


def _cut(ids: Ids | None, weights: Weights, goal: int, *, by_count: bool) -> tuple[Ids | None, Weights]:
    """Keep the shortest beginning, by rank, that measures at least `goal`; everything, if nothing does.

    The measure is the number of tokens or the sum of their weights.
    """
    found, upper = _upper(weights, goal, by_count=by_count)
    boundary = _boundary(upper, goal, by_count=by_count)
    if boundary is None:
        return ids, weights
    # Above the boundary value, and the first `ties` that equal it.
    value, ties = boundary
    chosen = np.flatnonzero(upper >= np.uint64(value))
    surplus = np.flatnonzero(upper[chosen] == np.uint64(value))[ties:]
    return _select(ids, weights, found[np.delete(chosen, surplus)])


def _upper(weights: Weights, goal: int, *, by_count: bool) -> tuple[Ids, Weights]:
    """Return places and values of the greatest weights, ascending in place: enough of them to measure `goal`.

    If there are too few, all that are positive. Most weights are far below those that are kept, and one look
    at all of them is a tenth of a millisecond: what is searched further is a short list.
    """
    if weights.size <= _SORTABLE:
        return np.arange(weights.size), weights
    for low in _LEVELS:
        found = np.flatnonzero(weights >= np.uint64(low))
        part = weights[found]
        if _measure(part, by_count=by_count) >= goal:
            break
    return found, part


def _measure(part: Weights, *, by_count: bool) -> int:
    return part.size if by_count else int(part.sum(dtype=np.uint64))


def _boundary(weights: Weights, goal: int, *, by_count: bool) -> tuple[int, int] | None:
    """Find the shortest beginning, by rank, that measures at least `goal`.

    A sort of 262,144 weights would take longer than the model's last layer, so the search narrows by value
    and sorts only what is left.

    Returns:
        The last kept weight and how many weights equal to it are kept; None: everything is.
    """
    low, high = 1 << 32, (1 << 32) + 1
    part = _between(weights, low, high)
    while (reached := _measure(part, by_count=by_count)) < goal:
        if low == 1:
            return None
        # What is at least `low` falls short of the goal: all of it stays.
        goal -= reached
        low, high = max(low >> 4, 1), low
        part = _between(weights, low, high)
    while part.size > _SORTABLE and high - low > 1:
        middle = (low + high) // 2
        upper = _between(part, middle, high)
        reached = _measure(upper, by_count=by_count)
        if reached >= goal:
            part, low = upper, middle
        else:
            part, high, goal = _between(part, low, middle), middle, goal - reached
    if high - low == 1:
        return low, goal if by_count else -(-goal // low)
    ranked = np.sort(part)[::-1]
    sums = np.arange(1, ranked.size + 1, dtype=np.uint64) if by_count else np.cumsum(ranked, dtype=np.uint64)
    last = int(np.searchsorted(sums, np.uint64(goal), side="left"))
    value = int(ranked[last])
    return value, last + 1 - int(np.count_nonzero(ranked > np.uint64(value)))


def _between(weights: Weights, low: int, high: int) -> Weights:
    # `compress`, since indexing with a mask takes three times as long.
    return np.compress((weights >= np.uint64(low)) & (weights < np.uint64(high)), weights)
