"""One operator whose kernel keeps the subnormals that all others flush."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_core.conformance.inputs import Floats
from mens_core.conformance.numpy_fma import fused
from mens_core.conformance.planted_fma import NumpyFmaOps
from mens_core.conformance.planted_weights import RememberingOps
from mens_core.ops import Ops

__all__ = ["keep_subnormals"]


def keep_subnormals(lane: Ops, operator: str = "softcap") -> Ops:
    """Return the lane with one of `NumpyFmaOps`' operators, computed without any flush.

    What it returns goes into the lane through an embedding, which flushes: only what it does with subnormals
    in between shows, as in a kernel whose results a correct one takes over.
    """
    planted, kept = RememberingOps(lane), NumpyFmaOps(lane, fused, _kept)
    # What was stored is read by the same hand.
    together = ("new_kv_cache", "kv_append") if operator == "attention" else ()
    for name in (operator, *together):
        setattr(planted, name, getattr(kept, name))
    return planted


def _kept(x: npt.ArrayLike) -> Floats:
    return np.asarray(x, np.float32)
