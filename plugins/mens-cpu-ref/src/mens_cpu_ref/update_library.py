"""C signatures of loss, gradients of parameters and update (native/update_abi.h).

Apart from `library`, so that a worker that only serves binds none of them.
"""

from __future__ import annotations

import ctypes

from mens_cpu_ref.library import Signatures

__all__ = ["UPDATE_OPERATORS"]

_P = ctypes.c_void_p
_W = ctypes.c_int32
_I = ctypes.c_int64
_U = ctypes.c_uint32
_S = ctypes.c_uint64
_F = ctypes.c_float

UPDATE_OPERATORS: Signatures = {
    "linear_backward": (_W, _P, _I, _I, _P, _I, _P),
    "quant_linear_backward": (_W, _P, _I, _I, _P, _I, _P),
    "embed_backward": (_P, _P, _P, _I, _I, _I, _P),
    "example_products": (_P, _P, _P, _I, _I, _I, _P),
    "cross_entropy": (_P, _P, _I, _I, _P, _P),
    "example_sums": (_P, _P, _P, _I, _P),
    "scale": (_P, _I, _I, _F, _P),
    "add_scaled": (_P, _P, _I, _I, _F, _P),
    "dropout": (_P, _P, _P, _I, _I, _S, _U, _U, _U, _F, _P),
    "sum_of_squares": (_P, _I, _P),
    "adamw": (_P, _P, _P, _P, _I, _I, _P),
}
"""Arguments of each operator after its prefix; all return int64."""
