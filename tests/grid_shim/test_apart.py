"""What a check says of two lanes that differ."""

from __future__ import annotations

import numpy as np

from grid_shim.check import apart


class _Lane:
    def __init__(self, *arrays):
        self.arrays = arrays

    def take_faults(self):
        return []


def _case(ops):
    return iter(ops.arrays)


def test_equal_bytes_are_not_apart():
    assert apart(_case, _Lane(np.float32([1, -0.0])), _Lane(np.float32([1, -0.0]))) is None


def test_the_first_element_is_named_with_its_bits():
    found = apart(_case, _Lane(np.float32([1, 0.0, 2])), _Lane(np.float32([1, -0.0, 3])))
    assert found == "result 0, element 1 (of 2 in 3): 00000000 beside 80000000"


def test_a_result_too_many_is_told():
    one = np.float32([1])
    assert apart(_case, _Lane(one, one), _Lane(one)) == "2 results beside 1"
