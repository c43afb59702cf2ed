"""The JSON of OpenAI's answers, built from ours. Pure.

Extensions live in `seed`, `vox` and `token_ids`; `finish_reason` keeps to the words clients know.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from vox_host.app.model_info import numerics_facts
from vox_host.app.service import AnswerToken, ModelInfo
from vox_host.models.tokenizer import Tokenizer
from vox_plugin_api import messages as m

__all__ = [
    "IMPOSSIBLE_LOGPROB",
    "chat_logprobs",
    "completion_logprobs",
    "prompt_tokens_of",
    "provenance",
]

IMPOSSIBLE_LOGPROB = -9999.0
"""How a probability of zero is written: JSON has no -Infinity."""


def provenance(info: ModelInfo, *, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what made the answer: the `vox` object of every response."""
    return {
        "plugin": info.plugin_id,
        "plugin_version": info.plugin_version,
        "lane": info.lane,
        "numerics": info.numerics,
        "numerics_error": numerics_facts(info.numerics_error),
        "model_digest": info.digest,
        "adapter_digest": None if info.adapter is None else info.adapter.digest,
        "degraded": info.degraded,
        "warnings": list(warnings),
    }


def chat_logprobs(tokens: Iterable[AnswerToken], tokenizer: Tokenizer, top: int) -> dict[str, Any]:
    """Return `logprobs` of a chat choice: the tokens' texts join to the content."""
    return {
        "content": [
            {
                "token": token.text,
                "logprob": _finite(token.logprob),
                "bytes": list(tokenizer.token_bytes(token.token_id)),
                "top_logprobs": [
                    {
                        "token": tokenizer.token_bytes(other.token_id).decode("utf-8", "replace"),
                        "logprob": _finite(other.logprob),
                        "bytes": list(tokenizer.token_bytes(other.token_id)),
                    }
                    for other in token.top[:top]
                ],
            }
            for token in tokens
        ],
        "refusal": None,
    }


def completion_logprobs(
    tokens: Iterable[AnswerToken], tokenizer: Tokenizer, top: int, *, offset: int = 0
) -> dict[str, Any]:
    """Return `logprobs` of a completion choice; `offset` is where the first token's text begins."""
    names: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token in tokens:
        name = _name(tokenizer, token.token_id)
        names.append(name)
        offsets.append(offset)
        offset += len(token.text)
        if token.logprob is None:
            values.append(None)
            tops.append(None)
            continue
        values.append(_finite(token.logprob))
        tops.append(_top(token, name, tokenizer, top))
    return {"tokens": names, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _top(token: AnswerToken, name: str, tokenizer: Tokenizer, top: int) -> dict[str, float]:
    best: dict[str, float] = {}
    for other in token.top[:top]:
        # Different tokens may have one text; the likelier one speaks for it.
        best.setdefault(_name(tokenizer, other.token_id), _finite(other.logprob))
    assert token.logprob is not None
    best.setdefault(name, _finite(token.logprob))
    return best


def _name(tokenizer: Tokenizer, token_id: int) -> str:
    """Return a token's text, or its bytes spelt out where they are no text on their own."""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    if logprob is None or math.isnan(logprob):
        raise ValueError("the worker gave a logprob that is not a number")
    return IMPOSSIBLE_LOGPROB if logprob == -math.inf else logprob


def prompt_tokens_of(scores: Sequence[m.GeneratedToken], texts: Sequence[str]) -> list[AnswerToken]:
    """Return the prompt's scored tokens in the form of an answer's."""
    return [
        AnswerToken(token.token_id, text, token.logprob, tuple(token.top))
        for token, text in zip(scores, texts, strict=True)
    ]
