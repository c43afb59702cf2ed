"""Rounding to bfloat16: against torch on every upper half, and by integers at the edges."""

from __future__ import annotations

import numpy as np
import pytest

from mens_core.bfloat16 import to_bfloat16
from oracle.update_integers import round_bfloat16


def floats(bits) -> np.ndarray:
    return np.array(bits, np.uint32).view(np.float32)


def test_it_rounds_to_nearest_even():
    # 1 + 2^-8 is halfway between 1 and 1 + 2^-7; 1 + 3 * 2^-8 is halfway to 1 + 2^-6.
    x = floats([0x3F800000, 0x3F808000, 0x3F808001, 0x3F818000, 0x3F817FFF, 0xBF808000, 0x3FFF8000])
    assert to_bfloat16(x).tolist() == [0x3F80, 0x3F80, 0x3F81, 0x3F82, 0x3F81, 0xBF80, 0x4000]


def test_subnormals_are_zero_of_their_sign():
    assert to_bfloat16(floats([0x007FFFFF, 0x80000001, 0x80000000, 0x00800000])).tolist() == [
        0, 0x8000, 0x8000, 0x0080
    ]  # fmt: skip


def test_every_upper_half_rounds_as_torch_does():
    import torch

    upper = np.arange(2**16, dtype=np.uint32) << np.uint32(16)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = upper | np.uint32(low)
        normal = ((bits >> 23) & 0xFF > 0) & (bits & 0x7FFFFFFF < 0x7F7F8000)
        x = bits[normal].view(np.float32)
        expected = torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()
        assert np.array_equal(to_bfloat16(x), expected)
        assert to_bfloat16(x)[::97].tolist() == [round_bfloat16(b) for b in bits[normal][::97].tolist()]


@pytest.mark.parametrize("bits", [0x7F7F8000, 0xFF7FFFFF, 0x7F800000, 0x7FC00000])
def test_what_no_bfloat16_is_near_is_refused(bits):
    x = np.ones((2, 3), np.float32)
    x[1, 2] = floats([bits])[0]
    with pytest.raises(ValueError, match=r"element \[1, 2\]"):
        to_bfloat16(x)
    assert to_bfloat16(floats([0x7F7F7FFF])).tolist() == [0x7F7F]
