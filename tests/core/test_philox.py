"""Philox4x32-10 against the known-answer vectors published with Random123."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_core.philox import philox, philox_words, uniform_u64

KNOWN = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFFFFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "seed", "words"), KNOWN)
def test_the_published_vectors_come_out(counter, seed, words):
    assert philox(seed, counter) == words


def test_the_first_word_is_the_low_half_of_64_bits():
    assert uniform_u64(0, (0, 0, 0, 0)) == 0xE169C58D_6627E8D5


@given(
    seed=st.integers(0, 2**64 - 1),
    stream=st.integers(0, 2**32 - 1),
    sample=st.integers(0, 2**32 - 1),
    count=st.integers(0, 40),
)
def test_many_words_at_once_are_the_words_one_by_one(seed, stream, sample, count):
    expected = [word for block in range(10) for word in philox(seed, (block, sample, stream, 0))]
    words = philox_words(seed, stream, sample, count)
    assert words.dtype == np.uint32
    assert words.tolist() == expected[:count]


@pytest.mark.parametrize(
    ("seed", "counter"), [(2**64, (0, 0, 0, 0)), (-1, (0, 0, 0, 0)), (0, (2**32, 0, 0, 0))]
)
def test_numbers_that_do_not_fit_are_refused(seed, counter):
    with pytest.raises(ValueError, match="bit"):
        philox(seed, counter)
