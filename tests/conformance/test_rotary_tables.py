"""Each lane's rotary operator turns by the cosines and sines that integers define."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from lanes.every_lane import EXACT, make_lane
from mens_core.ops import StoredTensor
from mens_core.rotary import attention_factor, frequencies, table
from vox_plugin_api.families.rope import Rope, Yarn

ROPES = {
    "gemma-local": Rope(theta=Fraction(10_000), head_dim=256),
    "qwen": Rope(theta=Fraction(1_000_000), head_dim=128),
    "yarn": Rope(
        theta=Fraction(1_000_000), head_dim=64, scaling=Yarn(factor=Fraction(4), original_context=2048)
    ),
}
BLOCKS = (0, 1, 9)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
@pytest.mark.parametrize("name", EXACT)
def test_a_unit_vector_shows_the_table(name, rope, request):
    """x1 = 1, x2 = 0 becomes (cos, sin) exactly: fma(1, cos, -0) and fma(0, cos, sin)."""
    lane = make_lane(name, request.config)
    freqs, factor = frequencies(rope), attention_factor(rope)
    half = rope.head_dim // 2
    positions = np.concatenate([np.arange(b * 128, (b + 1) * 128) for b in BLOCKS]).astype(np.int32)
    # A tensor of the lane's own, through its embedding of a table of ones and zeros.
    ones = np.concatenate([np.ones(half, np.float32), np.zeros(half, np.float32)])
    stored = StoredTensor("ones", "f32", (1, rope.head_dim), memoryview(ones.tobytes()))
    x = lane.embed(lane.load_matrix(stored), np.zeros(len(positions), np.int32), None, name="x")
    rotated = lane.to_host(lane.rope(x, 1, lane.rotary_table(freqs, factor), positions, name="rope"))
    tables = [table(freqs, factor, range(b * 128, (b + 1) * 128)) for b in BLOCKS]
    cos, sin = (np.concatenate(parts) for parts in zip(*tables, strict=True))
    assert rotated[:, :half].tobytes() == cos.tobytes()
    # x2 cos is +-0 and t is sine itself, so that only the sign of a zero may differ.
    assert (rotated[:, half:] == sin).all()
