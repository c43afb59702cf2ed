"""What is asked of every side: the prompts, as token ids, and how they are to be continued (pure)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vox_host.counted import counted
from vox_host.errors import UsageError
from vox_host.printable import printable
from vox_plugin_api import messages as m

__all__ = ["REFERENCE_PROMPTS", "Asked", "parse_prompts", "prompts_digest", "refuse_too_long"]

REFERENCE_PROMPTS = (
    "The quick brown fox jumps over the lazy dog. Then",
    "In 1687, Isaac Newton published the",
    "def fibonacci(n):\n    if n < 2:\n        return n\n",
)
"""Asked where no file of prompts is given."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: the prompt is scored and continued."""

    number: int
    """From 1."""
    token_ids: tuple[int, ...]
    max_tokens: int
    sampling: m.SamplingParams
    stop_token_ids: tuple[int, ...]

    @property
    def evaluate(self) -> m.EvaluateParams:
        return m.EvaluateParams(sequences=[list(self.token_ids)], logits_digest=True)

    @property
    def generate(self) -> m.GenerateParams:
        return m.GenerateParams(
            token_ids=list(self.token_ids),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop_token_ids=list(self.stop_token_ids),
            logprobs=1,
        )


def parse_prompts(data: bytes, name: str) -> list[str]:
    """Return the prompts of a file: one a line, blank lines left out.

    Raises:
        UsageError: it is no UTF-8, or holds no prompt.
    """
    name = printable(name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise UsageError(
            "prompt-encoding",
            f"--prompts {name}: not UTF-8 (byte {problem.start}); nothing was started",
            remedy="Save it as UTF-8.",
        ) from None
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise UsageError(
            "prompt-empty",
            f"--prompts {name}: there is no prompt in it; nothing was started",
            remedy="Put a prompt into each line.",
        )
    return prompts


def prompts_digest(asked: Sequence[Asked]) -> str:
    """Return the SHA-256 of everything that is asked: token ids and how they are continued."""
    facts: list[dict[str, Any]] = [
        {"evaluate": one.evaluate.model_dump(mode="json"), "generate": one.generate.model_dump(mode="json")}
        for one in asked
    ]
    return hashlib.sha256(m.canonical_json({"requests": facts})).hexdigest()


def refuse_too_long(asked: Sequence[Asked], context_length: int | None, *, is_models: bool) -> None:
    """Refuse a prompt that no worker will take, before one is started.

    Args:
        context_length: the most positions that there can be; None: not known before a plugin has loaded.
        is_models: the number is the model's own, and no option makes it larger.

    Raises:
        UsageError: prompt and answer of a request are longer.
    """
    for one in asked:
        needed = len(one.token_ids) + one.max_tokens
        if context_length is not None and needed > context_length:
            shorten = (
                f"Shorten the prompt or lower --max-tokens, by {counted(needed - context_length, 'token')}"
            )
            raise UsageError(
                "context_length_exceeded",
                f"prompt {one.number} has {counted(len(one.token_ids), 'token')}, which with --max-tokens "
                f"{one.max_tokens} are more than the context holds; nothing was started",
                facts=[("needed", needed), ("context_length", context_length)],
                remedy=f"{shorten}." if is_models else f"{shorten}, or raise --context-length.",
            )
