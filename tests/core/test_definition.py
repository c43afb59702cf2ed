"""A case's definition: the digest of what it asks of a lane, whatever the lane answers."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from mens_core.conformance.definition import definition
from mens_core.conformance.inputs import floats, put, stored_float
from mens_core.conformance.suite import GROUPS, cases_of
from mens_core.ops import AttentionSpec


def case(
    ops, *, operand=None, factor=2.0, name="y", row=0, outputs=1, starts=(0, 2, 5), window=None, swapped=False
):
    x = put(ops, floats(1, 5, 40) if operand is None else operand)
    w = ops.load_vector(stored_float(floats(2, 40)))
    y = ops.rms_norm(w, x, 1e-6, name=name) if swapped else ops.rms_norm(x, w, 1e-6, name=name)
    z = ops.scale(y, factor, name="z")
    parts = ops.example_products(z, z, np.array(starts, np.int32), name="parts")
    spec = AttentionSpec(heads=1, kv_heads=1, head_dim=40, scale=1.0, window=window)
    parts.append(ops.attention(z, None, 0, None, spec, name="attention"))
    for part in parts[:outputs]:
        yield ops.to_host(part)[row : row + 1]


def one_bit_off():
    changed = floats(1, 5, 40)
    changed.view(np.uint32)[4, 39] ^= 1
    return changed


@pytest.mark.parametrize(
    "change",
    [
        {"operand": one_bit_off()},
        {"factor": 2.0000000000000004},
        {"factor": 2},
        {"name": "x"},
        {"row": 1},
        {"outputs": 2},
        {"starts": (0, 3, 5)},
        {"starts": (0, 5)},
        {"window": 7},
        {"swapped": True},
    ],
    ids=str,
)
def test_whatever_is_asked_is_part_of_it(change):
    assert definition(case) == definition(partial(case, operand=floats(1, 5, 40)))
    assert definition(partial(case, **change)) != definition(case)


def test_an_operand_without_bytes_is_refused():
    with pytest.raises(TypeError, match="no bytes: set"):
        definition(lambda ops: iter([ops.add({1}, {2})]))


def test_no_two_cases_are_the_same():
    made = [definition(one) for group in GROUPS for one in cases_of(group).values()]
    assert len(set(made)) == len(made) > 100
