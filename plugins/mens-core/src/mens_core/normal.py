"""Normal random numbers, each a function of a seed and a counter, without a library's logarithm.

The polar method needs one logarithm, one root and one quotient of a pair that lies in the unit
disc; which pairs do is a comparison of integers. docs/numerics.md, section 13.5, is the definition.

Source: Marsaglia and Bray, "A convenient method for generating normal variables", SIAM Review 6 (1964).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mens_core.conformance.numpy_fma import fma
from mens_core.philox import STREAM_LORA, philox_blocks

__all__ = ["log", "normals"]

Floats = npt.NDArray[np.float32]

_BIAS = 0x3F3504F3
_COEFFICIENTS = (
    0x3D5AC715,
    0xBDDF91EC,
    0x3DF7F82E,
    0xBE0081F1,
    0x3E1181B7,
    0xBE2A978C,
    0x3E4CD2A0,
    0xBE800038,
    0x3EAAAAA4,
)
_LN2_HIGH, _LN2_LOW = 0x3F317200, 0x35BFBE8E


def normals(seed: int, number: int, count: int) -> Floats:
    """Return `count` numbers of mean 0 and variance 1: first values of the adapted matrix `number`."""
    values = np.empty((-(-count // 2), 2), np.float32)
    open_pairs = np.arange(len(values), dtype=np.uint64)
    attempt = 0
    while len(open_pairs):
        words = philox_blocks(seed, open_pairs, (number, STREAM_LORA, attempt))[:, :2]
        # Odd numerators over 2^24, as those of uniform first values.
        pair = 2 * (words >> np.uint32(8)).astype(np.int64) + 1 - (1 << 24)
        square = (pair * pair).sum(axis=1)
        is_inside = square < 1 << 48
        values[open_pairs[is_inside].astype(np.int64)] = _polar(pair[is_inside], square[is_inside])
        open_pairs = open_pairs[~is_inside]
        attempt += 1
    return values.reshape(-1)[:count]


def _polar(pair: npt.NDArray[np.int64], square: npt.NDArray[np.int64]) -> Floats:
    # A square has at most 48 bits: exact in float64, so that this rounds once.
    s = square.astype(np.float64).astype(np.float32) * np.float32(2.0**-48)
    factor = np.sqrt((log(s) * np.float32(-2)) / s)
    return (pair.astype(np.float32) * np.float32(2.0**-24)) * factor[:, None]


def log(x: Floats) -> Floats:
    """Return the logarithm of normal positive numbers by the sequence of docs/numerics.md, section 3."""
    bits = x.view(np.int32)
    exponent = (bits - np.int32(_BIAS)) >> np.int32(23)
    f = (bits - (exponent << np.int32(23))).view(np.float32) - np.float32(1)
    n, z = exponent.astype(np.float32), f * f
    p = np.broadcast_to(_float(_COEFFICIENTS[0]), f.shape)
    for coefficient in _COEFFICIENTS[1:]:
        p = fma(p, f, _float(coefficient))
    t = fma(n, _float(_LN2_LOW), (z * f) * p)
    t = f + fma(z, np.float32(-0.5), t)
    return fma(n, _float(_LN2_HIGH), t)


def _float(bits: int) -> np.float32:
    value: np.float32 = np.uint32(bits).view(np.float32)
    return value
