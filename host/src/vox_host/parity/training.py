"""Steps of training that every side takes: what is asked, what came of each, where two sides part (pure).

The examples are the prompts, each cut to its first tokens; every step learns all of them. Low-rank
updates lie on all linear layers, with dropout, clipping and decay, so that every part of a step has a
say in its bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from vox_host.errors import UsageError
from vox_host.parity.requests import Asked
from vox_plugin_api import messages as m
from vox_plugin_api import train_messages as t

__all__ = [
    "EXAMPLE_TOKENS",
    "Taken",
    "TrainingAsked",
    "TrainingParting",
    "apart",
    "ask_steps",
    "first_step_apart",
    "short",
]

EXAMPLE_TOKENS = 64
"""The most that is taken of a prompt: a step on the CPU is seconds then, and crosses no KV block."""
RANK = 8
_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def short(digest: str) -> str:
    """Return as much of a digest as tables and sentences show; certificates and JSON have all of it."""
    return digest[:16]


def apart(expected: str, found: str) -> tuple[str, str]:
    """Return as much of two values as shows where they part; the beginning, if that does."""
    if short(expected) != short(found):
        return short(expected), short(found)
    shorter = min(len(expected), len(found))
    at = next((i for i in range(shorter) if expected[i] != found[i]), shorter)
    shown = (f"...{text[at : at + 16]} (from its character {at + 1})" for text in (expected, found))
    return next(shown), next(shown)


@dataclass(frozen=True, slots=True)
class TrainingAsked:
    """K steps on the same examples."""

    begin: t.TrainBeginParams
    examples: tuple[t.TrainExample, ...]
    steps: int

    @property
    def digest(self) -> str:
        """SHA-256 of everything that is asked."""
        facts = {
            "begin": self.begin.model_dump(mode="json"),
            "examples": [example.model_dump(mode="json") for example in self.examples],
            "steps": self.steps,
        }
        return hashlib.sha256(m.canonical_json(facts)).hexdigest()


@dataclass(frozen=True, slots=True)
class Taken:
    """What one side made of one step; numbers as the bits of a float32, in hex."""

    step: int
    """From 1; 0: the adapter before any step, of which there is a digest alone."""
    loss: str
    gradient_norm: str
    learning_rate: str
    trained_tokens: int
    adapter_digest: str

    @classmethod
    def begun(cls, result: t.TrainBeginResult) -> Taken:
        """Return what there is before any step."""
        return cls(0, "", "", "", 0, result.adapter_digest)

    @classmethod
    def of(cls, result: t.TrainStepResult) -> Taken:
        """Return a step as it is compared."""
        return cls(
            step=result.step,
            loss=m.f32_bits(result.loss),
            gradient_norm=m.f32_bits(result.gradient_norm),
            learning_rate=m.f32_bits(result.learning_rate),
            trained_tokens=result.trained_tokens,
            adapter_digest=result.adapter_digest,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingParting:
    """The first value of the first step in which a side is not the first side."""

    side: str
    against: str
    step: int
    what: str
    """The field of `Taken`, or `steps`: one side took fewer."""
    expected: str
    found: str
    operator: str | None = None
    """The first that differs on the suite's cases; None: none of them does, or the side is a certificate."""
    case: str | None = None
    element: int | None = None
    operator_expected: str | None = None
    operator_found: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return asdict(self)

    def __str__(self) -> str:
        place = f"step {self.step}" if self.step else "the adapter before step 1"
        expected, found = apart(self.expected, self.found)
        text = f"training, {place}: {self.what}: expected {expected}, found {found}"
        if self.operator is None:
            return text
        text += f"; first operator {self.operator} (case {self.case}"
        return text + (")" if self.element is None else f", element {self.element}: "
                       f"expected {self.operator_expected}, found {self.operator_found})")  # fmt: skip


def ask_steps(asked: Sequence[Asked], steps: int, seed: int) -> TrainingAsked:
    """Return the steps that prompts make.

    Raises:
        UsageError: no prompt has two tokens, so there is nothing to learn.
    """
    taken = [list(one.token_ids[:EXAMPLE_TOKENS]) for one in asked]
    examples = tuple(
        t.TrainExample(token_ids=tokens, loss_mask=[False] + [True] * (len(tokens) - 1))
        for tokens in taken
        if len(tokens) > 1
    )
    if not examples:
        raise UsageError(
            "nothing-to-train",
            "--train-steps: no prompt has two tokens, so there is nothing to learn; nothing was started",
            facts=[("prompts", len(asked))],
            remedy="Give a longer prompt with --prompts.",
        )
    # Powers of two and their sums: each is a float32, and reads in JSON as it was meant.
    begin = t.TrainBeginParams(
        adapter=t.AdapterConfig(rank=RANK, alpha=16.0, targets=list(_LINEAR_LAYERS), dropout=0.0625),
        optimizer=t.OptimizerConfig(learning_rate=2.0**-10, weight_decay=0.0625, max_gradient_norm=1.0),
        schedule=t.Schedule(kind="cosine", warmup_steps=1, total_steps=steps + 2),
        seed=seed,
    )
    return TrainingAsked(begin, examples, steps)


def first_step_apart(
    first: Sequence[Taken], other: Sequence[Taken], *, side: str, against: str
) -> TrainingParting | None:
    """Return where `other` stops being `first`; None: nowhere."""
    for a, b in zip(first, other, strict=False):
        for what, expected in asdict(a).items():
            found = asdict(b)[what]
            if found != expected:
                return TrainingParting(
                    side=side,
                    against=against,
                    step=a.step,
                    what=what,
                    expected=str(expected),
                    found=str(found),
                )
    if len(first) == len(other):
        return None
    return TrainingParting(
        side=side,
        against=against,
        step=min(len(first), len(other)),
        what="steps",
        expected=str(len(first)),
        found=str(len(other)),
    )
