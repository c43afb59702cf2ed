"""How far a float32 forward may be from the exact one.

A float32 sum of K products is the exact sum with each weight off by at most (K + 1) u,
u = 2^-24 (Higham, Accuracy and Stability, section 3.5), and the few operations between two
matmuls (norm, rotation, gate, softmax, add) add no more than a dozen u, which the weights
around them can stand for too. So the float32 logits are the exact logits of weights that are
off by at most (K + 12) u each. Drawing such weights with random signs shows how much the
logits move; the worst of a few draws, doubled, bounds the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.float64_forward import Settings, forward

U = 2.0**-24


def logit_bound(
    settings: Settings, tensors: Mapping[str, npt.NDArray[Any]], head_name: str, token_ids: Sequence[int]
) -> tuple[npt.NDArray[np.float64], float]:
    """Return the exact logits and how far any float32 logit may be from them."""
    exact = _head_logits(settings, tensors, head_name, token_ids)
    worst = 0.0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        moved = {
            name: w.astype(np.float64) * (1 + rng.choice((-1, 1), w.shape) * (w.shape[-1] + 12) * U)
            for name, w in sorted(tensors.items())
        }
        other = _head_logits(settings, moved, head_name, token_ids)
        worst = max(worst, float(np.abs(other - exact).max()))
    return exact, 2 * worst


def _head_logits(
    settings: Settings, tensors: Mapping[str, npt.NDArray[Any]], head_name: str, token_ids: Sequence[int]
) -> npt.NDArray[np.float64]:
    return forward(settings, tensors.__getitem__, lambda _: tensors[head_name], token_ids)
