"""Log-probabilities of tokens under the unmodified distribution (temperature 1, no penalties).

A logprob is one rounded subtraction, logit minus `Ops.log_normaliser`; the most likely tokens
are ranked by logit, the lower id first among equals.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_core.sampling import flush_to_zero
from vox_plugin_api.messages import GeneratedToken, TokenLogprob

__all__ = ["score_token", "top_ids"]

Row = npt.NDArray[np.float32]

_GROUPS = 512


def score_token(logits: Row, normaliser: np.float32, token_id: int, top: int) -> GeneratedToken:
    """Return a token with its logprob and those of the `top` most likely ones.

    Args:
        logits: [V] of the position before the token, untouched by penalties.
        normaliser: that row's log-normaliser.
    """
    ids = top_ids(logits, top)
    chosen, *others = flush_to_zero(logits[[token_id, *ids]] - normaliser).tolist()
    return GeneratedToken(
        token_id=token_id,
        logprob=chosen,
        top=[TokenLogprob(token_id=i, logprob=x) for i, x in zip(ids, others, strict=True)],
    )


def top_ids(logits: Row, count: int) -> list[int]:
    """Return the ids of the `count` greatest logits, greatest first, the lower id first on ties."""
    candidates = np.arange(logits.size)
    if 0 < count <= _GROUPS < logits.size:
        # Each of `count` groups has a maximum at least as great as the count-th greatest of
        # all the groups' maxima, so that bound excludes none of the tokens we look for.
        starts = np.arange(0, logits.size, -(-logits.size // _GROUPS))
        if count <= starts.size:
            maxima = np.maximum.reduceat(logits, starts)
            bound = np.sort(maxima)[-count]
            candidates = np.flatnonzero(logits >= bound)
    order = np.argsort(-logits[candidates], kind="stable")[:count]
    ids: list[int] = candidates[order].tolist()
    return ids
