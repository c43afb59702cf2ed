"""The block pool: what is promised, what is handed out, what comes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_core.kv_blocks import BlockPool, blocks_for


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2)])
def test_a_block_holds_128_positions(positions, blocks):
    assert blocks_for(positions) == blocks


def test_a_reservation_is_a_promise_and_blocks_are_taken_when_positions_need_them():
    pool = BlockPool(4)
    first = pool.reserve(3)
    assert (pool.used, pool.reserved, pool.can_reserve(1), pool.can_reserve(2)) == (0, 3, True, False)
    first.grow_to(129)
    assert (first.table, pool.used) == ([0, 1], 2)
    with pytest.raises(ValueError, match="385 positions need more than the 3 blocks"):
        first.grow_to(385)
    with pytest.raises(ValueError, match="2 blocks wanted, 1 of 4"):
        pool.reserve(2)


def test_the_lowest_free_block_comes_first_so_untouched_memory_stays_untouched():
    pool = BlockPool(8)
    a, b = pool.reserve(2), pool.reserve(2)
    a.grow_to(256)
    b.grow_to(1)
    a.release()
    c = pool.reserve(3)
    c.grow_to(384)
    assert (b.table, c.table, pool.touched) == ([2], [0, 1, 3], 4)


def test_releasing_twice_gives_back_once():
    pool = BlockPool(2)
    a = pool.reserve(2)
    a.grow_to(256)
    a.release()
    a.release()
    assert (pool.used, pool.reserved) == (0, 0)
    b = pool.reserve(2)
    b.grow_to(256)
    assert sorted(b.table) == [0, 1]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 512), st.booleans()), max_size=30))
def test_no_block_ever_has_two_owners_and_none_is_lost(events):
    pool = BlockPool(9)
    alive = []
    for blocks, positions, leaves in events:
        if pool.can_reserve(blocks):
            one = pool.reserve(blocks)
            one.grow_to(min(positions, blocks * 128))
            alive.append(one)
        if leaves and alive:
            alive.pop(0).release()
        owned = [block for one in alive for block in one.table]
        assert len(owned) == len(set(owned)) == pool.used <= pool.reserved <= pool.total
    for one in alive:
        one.release()
    assert (pool.used, pool.reserved) == (0, 0)
