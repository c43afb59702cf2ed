"""How far fast numerics are from canonical ones on one model, on prompts that anyone can draw again."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_core.kv_blocks import blocks_for
from mens_core.models.model import Model
from mens_core.ops import Batch
from mens_core.philox import STREAM_VECTORS, philox_words
from vox_plugin_api.backend import BackendError
from vox_plugin_api.messages import NumericsError

__all__ = ["compare_logits", "reference_logits"]

PROMPTS, LENGTH = 2, 48
_SEED = 2026


def reference_logits(model: Model) -> npt.NDArray[np.float32]:
    """Logits of every position of the reference prompts, one prompt after the other: [96, V].

    Raises:
        BackendError: `numerics-not-measured`: a row is not finite.
    """
    words = philox_words(_SEED, STREAM_VECTORS, 0, PROMPTS * LENGTH)
    ids = (words % np.uint32(model.config.vocab_size)).astype(np.int32).reshape(PROMPTS, LENGTH)
    made = []
    for prompt in ids:
        batch = Batch(
            token_ids=prompt,
            positions=np.arange(LENGTH, dtype=np.int32),
            starts=np.array([0, LENGTH], np.int32),
            block_tables=np.arange(blocks_for(LENGTH), dtype=np.int32)[None],
            logit_rows=np.arange(LENGTH, dtype=np.int32),
        )
        result = model.forward(batch, model.new_cache(blocks_for(LENGTH)))
        if result.faults or result.logits is None:
            name = result.faults[0].name if result.faults else "logits"
            raise BackendError(
                "numerics-not-measured",
                f"{name} is not finite on a reference prompt, so fast numerics can't be held against "
                "canonical ones; nothing was loaded",
                facts={"operator": name},
                remedy="Serve the model with canonical numerics, or see whether its weights are right.",
            )
        made.append(np.array(model.ops.to_host(result.logits), np.float32))
    return np.concatenate(made)


def compare_logits(canonical: npt.NDArray[np.float32], fast: npt.NDArray[np.float32]) -> NumericsError:
    """Return how far rows of logits [L, V] are from the canonical ones."""
    furthest, divergences = 0.0, []
    for right, found in zip(canonical.astype(np.float64), fast.astype(np.float64), strict=True):
        furthest = max(furthest, float(np.abs(right - found).max()))
        of_right, of_found = _log_softmax(right), _log_softmax(found)
        divergences.append(float((np.exp(of_right) * (of_right - of_found)).sum()))
    return NumericsError(
        positions=len(canonical),
        max_logit_difference=furthest,
        mean_kl=max(0.0, float(np.mean(divergences))),
        equal_argmax=float((canonical.argmax(1) == fast.argmax(1)).mean()),
    )


def _log_softmax(logits: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    shifted = logits - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))
