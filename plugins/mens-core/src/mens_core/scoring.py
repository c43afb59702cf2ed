"""The losses of neighbouring examples, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from mens_core.differentiate import Score, score
from mens_core.micro_batches import Example, cut, pack
from mens_core.models.model import Model
from mens_core.training_ops import TrainingOps

__all__ = ["score_examples"]


def score_examples(
    model: Model,
    ops: TrainingOps,
    examples: Sequence[Example],
    *,
    micro_batch_size: int | None,
    digests: bool,
) -> Generator[None, None, list[Score]]:
    """Return each example's score, yielding on the way; no score depends on an example's number.

    Raises:
        BackendError: `non-finite`.
    """
    scores: list[Score] = []
    for together in cut(examples, micro_batch_size, ops.rows_at_once):
        micro = pack(
            examples[together.start : together.stop],
            together.start,
            whole=digests,
            logit_rows=ops.logit_rows_at_once,
        )
        scores += yield from score(model, ops, micro, digests=digests)
    return scores
