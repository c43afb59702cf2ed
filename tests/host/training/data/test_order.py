from __future__ import annotations

import hashlib
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vox_host.training.data import Example, order, split


def example(*ids, line=1):
    return Example(array("I", ids), bytes([0] + [1] * (len(ids) - 1)), line)


def test_the_order_is_the_one_that_anybody_can_work_out():
    def key(index):
        return hashlib.sha256(
            b"vox-order" + b"".join(n.to_bytes(8, "little") for n in (7, 2, index))
        ).hexdigest()

    assert order(7, 2, 100) == sorted(range(100), key=key)


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else():
    assert order(1, 0, 50) == order(1, 0, 50)
    random.seed(5)
    assert order(1, 0, 50) == order(1, 0, 50)
    assert len({tuple(order(seed, epoch, 50)) for seed in (0, 1, 2**64 - 1) for epoch in (0, 1)}) == 6
    assert order(1, 0, 50) != list(range(50))
    # A longer file keeps the relative order of the rows that were there.
    assert [i for i in order(1, 0, 60) if i < 50] == order(1, 0, 50)
    assert order(3, 0, 0) == []


@given(st.integers(0, 2**64 - 1), st.integers(0, 1000), st.integers(0, 80))
def test_an_order_holds_every_example_once(seed, epoch, count):
    assert sorted(order(seed, epoch, count)) == list(range(count))


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=3), max_size=30),
    st.data(),
    st.integers(0, 2**64 - 1),
)
def test_no_example_is_on_both_sides_and_none_is_lost(ids, data, seed):
    examples = [example(*row, line=n) for n, row in enumerate(ids, start=1)]
    wanted = data.draw(st.integers(0, max(0, len(examples) - 1)))
    parts = split(examples, wanted, seed)
    assert sorted(parts.train + parts.held_out) == list(range(len(examples)))
    assert len(parts.held_out) <= wanted
    sides = [{tuple(ids[index]) for index in part} for part in (parts.train, parts.held_out)]
    assert not sides[0] & sides[1]


@given(st.permutations(range(20)), st.integers(0, 2**64 - 1))
def test_what_is_held_out_does_not_depend_on_the_order_of_the_file(places, seed):
    examples = [example(5, n) for n in range(20)]
    chosen = {tuple(examples[i].token_ids) for i in split(examples, 6, seed).held_out}
    moved = [examples[place] for place in places]
    assert {tuple(moved[i].token_ids) for i in split(moved, 6, seed).held_out} == chosen
    assert len(chosen) == 6


def test_a_share_is_a_number_of_examples():
    examples = [example(5, n) for n in range(20)]
    assert split(examples, 0.1, 1) == split(examples, 2, 1)
    assert split(examples, 2, 1) != split(examples, 2, 2)
    assert split(examples, 0, 1).held_out == ()
    for wrong in (-1, 20, 1.0):
        with pytest.raises(ValueError, match="leaves none to train"):
            split(examples, wrong, 1)


def test_the_mask_is_part_of_an_example():
    one, other = example(1, 2, 3), Example(array("I", [1, 2, 3]), bytes([0, 0, 1]), 1)
    assert one.digest() != other.digest()
    assert (
        one.digest()
        == hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]) + bytes([0, 1, 1])).digest()
    )
