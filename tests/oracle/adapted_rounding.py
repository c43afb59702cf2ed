"""How far float32 logits of a model with an adapter may be from the exact ones.

As in `rounding`: a float32 product with a weight is the exact one with the weight off by a few u, so
drawing such weights bounds what rounding can do. Served beside its base, W is off by (K + 12) u, A by
(K + 12) u and B by (r + 12) u, as the products with them are sums of K and of r terms. Merged, B A is
off by (r + 3) u, the sum by another u, and then all of it by (K + 12) u.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from oracle.float64_forward import Settings, forward
from oracle.rounding import U

__all__ = ["difference_bound"]

Array = npt.NDArray[np.float64]
Tensors = Mapping[str, npt.NDArray[Any]]
Update = tuple[npt.NDArray[Any], npt.NDArray[Any], float]


def _moved_logits(
    settings: Settings,
    tensors: Tensors,
    head: str,
    ids: Sequence[int],
    updates: Mapping[str, Update],
    seed: int,
    *,
    is_merged: bool,
) -> Array:
    rng = np.random.default_rng(seed)

    def off(values: Array, terms: int) -> Array:
        return values * (1 + rng.choice((-1, 1), values.shape) * terms * U)

    moved = {}
    for name, w in sorted(tensors.items()):
        w = w.astype(np.float64)
        columns = w.shape[-1]
        if name in updates:
            a, b, scale = updates[name]
            a, b = a.astype(np.float64), b.astype(np.float64)
            rank = len(a)
            if is_merged:
                moved[name] = off(w + off(scale * b @ a, rank + 3), columns + 13)
            else:
                moved[name] = off(w, columns + 12) + scale * off(b, rank + 12) @ off(a, columns + 12)
        else:
            moved[name] = off(w, columns + 12)
    return forward(settings, moved.__getitem__, lambda _: moved[head], ids)


def difference_bound(
    settings: Settings, tensors: Tensors, head: str, ids: Sequence[int], updates: Mapping[str, Update]
) -> tuple[Array, float, float]:
    """Return the exact logits, and how far those of an adapter that is served, or merged, may be from them.

    Args:
        tensors: the base's, as `Settings` names them; `head` among them.
        updates: A, B and scale by the name of the weight that they lie on.
    """
    tensors = {name: values.astype(np.float64) for name, values in tensors.items()}
    exact_tensors = {
        name: w + updates[name][2] * updates[name][1].astype(np.float64) @ updates[name][0].astype(np.float64)
        if name in updates
        else w
        for name, w in tensors.items()
    }
    exact = forward(settings, exact_tensors.__getitem__, lambda _: exact_tensors[head], ids)
    worst = [
        max(
            float(np.abs(_moved_logits(settings, tensors, head, ids, updates, s, is_merged=m) - exact).max())
            for s in range(3)
        )
        for m in (False, True)
    ]
    return exact, 2 * worst[0], 2 * worst[1]
