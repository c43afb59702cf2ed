"""One row, two rows."""

from __future__ import annotations

import pytest

from vox_host.counted import counted


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 rows"),
        (1, "1 row"),
        (2, "2 rows"),
        (1.0, "1 row"),
        (0.125, "0.125 rows"),
        (12345678, "12345678 rows"),
    ],
)
def test_a_number_and_its_thing(count, text):
    assert counted(count, "row") == text


def test_a_word_with_a_plural_of_its_own():
    assert [counted(n, "matrix", "matrices") for n in (1, 2)] == ["1 matrix", "2 matrices"]
