"""The `usage` object of an answer, over HTTP and on the command line. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vox_host.app.service import AnswerEnd

__all__ = ["cached_of_prompt", "usage"]


def usage(
    prompt_tokens: int, completion_tokens: int, cached_tokens: Iterable[int | None] = ()
) -> dict[str, Any]:
    """Return the usage object.

    Args:
        cached_tokens: of each prompt, how many of its tokens nobody computed for this request; if one is
            None, the worker did not say, and there are no details.
    """
    cached = list(cached_tokens)
    known = [count for count in cached if count is not None]
    details = {"prompt_tokens_details": {"cached_tokens": sum(known)}} if len(known) == len(cached) else {}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        **details,
    }


def cached_of_prompt(choices: Iterable[AnswerEnd]) -> int | None:
    """Return how many tokens of a prompt were computed for none of its choices: it is counted once.

    The first choice computes what the others then find; None: the worker did not say.
    """
    found = [end.cached_tokens for end in choices]
    known = [count for count in found if count is not None]
    return min(known) if known and len(known) == len(found) else None
