"""C signatures of the backward operators (native/backward_abi.h).

Apart from `library`, so that a worker that only serves binds none of them.
"""

from __future__ import annotations

import ctypes

from mens_cpu_ref.library import Signatures

__all__ = ["BACKWARD_OPERATORS"]

_P = ctypes.c_void_p
_I = ctypes.c_int64
_F = ctypes.c_float
_STEP = (_I, _I, _I, _I, _P, _P, _P, _I, _I, _I, _P, _P, _F, _I, _F)
"""Rows, heads, KV heads and width; the step's positions and blocks; the cache; the constants."""

BACKWARD_OPERATORS: Signatures = {
    "norm_backward": (_P, _P, _P, _I, _I, _I, _F, _P),
    "rope_backward": (_P, _I, _I, _I, _P, _P, _I, _P, _P),
    "silu_gate_backward": (_P, _P, _P, _I, _I, _P, _P),
    "gelu_gate_backward": (_P, _P, _P, _I, _I, _P, _P),
    "softcap_backward": (_P, _P, _I, _I, _F, _P),
    "attention_saving": (_P, *_STEP, _P, _P, _P),
    "attention_backward": (_P, _P, _P, _P, _P, *_STEP, _P, _P, _P),
}
"""Arguments of each operator after its prefix; all return int64."""
