"""The tree over examples: its shape for every count, and that only the order of leaves matters."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_core.example_tree import ExampleTree


def spelled(a: str, b: str) -> str:
    return f"({a}+{b})"


def by_definition(leaves: list[str]) -> str:
    """Level by level, as the page says: neighbours meet, a missing right side passes the left."""
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [spelled(*pair) if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


@given(st.integers(1, 70))
def test_the_shape_is_the_aligned_tree(count):
    tree = ExampleTree(spelled)
    for i in range(count):
        tree.push(str(i))
    assert tree.total() == by_definition([str(i) for i in range(count)])


def test_seven_examples():
    tree = ExampleTree(spelled)
    for i in range(7):
        tree.push(str(i))
    assert tree.total() == "(((0+1)+(2+3))+((4+5)+6))"


def test_the_total_may_be_asked_on_the_way():
    tree = ExampleTree(spelled)
    seen = []
    for i in range(5):
        tree.push(str(i))
        seen.append(tree.total())
    assert seen == [by_definition([str(i) for i in range(n)]) for n in range(1, 6)]


def test_no_example_is_an_error():
    with pytest.raises(ValueError, match="without examples"):
        ExampleTree(spelled).total()
