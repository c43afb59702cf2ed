"""Which blocks may be shared: those whose ids agree from the start, whatever their hashes say."""

from __future__ import annotations

import pytest

from mens_core.prefix_index import PrefixIndex

IDS = tuple(range(128))
OTHERS = (*IDS[:-1], 999)


def test_a_block_is_found_by_its_own_ids_behind_the_block_it_stands_behind():
    index = PrefixIndex()
    first = index.add(7, "base", None, IDS)
    second = index.add(3, "base", first, OTHERS)
    assert index.find("base", None, list(IDS)) is first
    assert index.find("base", first, OTHERS) is second
    assert index.find("base", None, OTHERS) is None
    assert index.find("base", first, IDS) is None
    assert index.find("base", second, OTHERS) is None


@pytest.mark.parametrize("origin", ["base with an adapter", "", "bas"])
def test_what_else_decides_the_bytes_is_part_of_what_is_found(origin):
    index = PrefixIndex()
    index.add(7, "base", None, IDS)
    assert index.find(origin, None, IDS) is None
    assert index.add(8, origin, None, IDS) is not None
    assert index.find("base", None, IDS).number == 7


def test_a_hash_alone_decides_nothing():
    index = PrefixIndex(digest=lambda data: b"the same for all")
    first = index.add(7, "base", None, IDS)
    assert index.find("base", None, IDS) is first
    assert index.find("base", None, OTHERS) is None
    assert index.find("other", None, IDS) is None
    assert index.find("base", first, IDS) is None
    assert index.add(8, "base", None, OTHERS) is None
    assert index.find("base", None, IDS) is first


def test_a_hash_that_forgets_what_came_before_decides_nothing():
    index = PrefixIndex(digest=lambda data: data[-128 * 8 :])
    a, b = index.add(1, "base", None, IDS), index.add(2, "base", None, OTHERS)
    behind_a = index.add(3, "base", a, (5,) * 128)
    assert index.find("base", a, (5,) * 128) is behind_a
    assert index.find("base", b, (5,) * 128) is None
    assert index.add(4, "base", b, (5,) * 128) is None


def test_a_block_is_forgotten_whole():
    index = PrefixIndex()
    first = index.add(7, "base", None, IDS)
    index.remove(first)
    assert (index.find("base", None, IDS), len(index)) == (None, 0)


@pytest.mark.parametrize("count", [0, 1, 127, 129])
def test_a_block_that_is_not_whole_cannot_be_shared(count):
    with pytest.raises(ValueError, match=f"block 7 has {count} ids"):
        PrefixIndex().add(7, "base", None, range(count))
