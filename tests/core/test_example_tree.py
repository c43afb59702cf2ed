"""The tree over examples: its shape for every count, and that only the order of leaves matters."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mens_core.example_tree import ExampleTree
from mens_core.step_gradients import push_all
from mens_core.training_ops import TrainingOps


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


class Spelling:
    """A lane whose sums are spelled out."""

    sum_run = TrainingOps.sum_run

    def add(self, a, b, *, name):
        return spelled(a, b)


@settings(deadline=None)
@given(st.integers(0, 40), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_neighbours_pushed_at_once_are_the_same_nodes(first, counts):
    alone, at_once = (ExampleTree(spelled, first=first) for _ in range(2))
    at = first
    for count in counts:
        leaves = [str(i) for i in range(at, at + count)]
        for leaf in leaves:
            alone.push(leaf)
        push_all(at_once, Spelling(), leaves, name="sum")
        at += count
    assert at_once.nodes() == alone.nodes()


@settings(deadline=None)
@given(st.integers(0, 200), st.integers(1, 70), st.sampled_from([1, 2, 8]))
def test_runs_are_whole_nodes_and_no_two_of_them_make_one(first, count, most):
    sizes = ExampleTree(spelled, first=first).runs(count, most)
    assert sum(sizes) == count
    at = first
    for size, after in zip(sizes, [*sizes[1:], 0], strict=True):
        assert size <= most
        assert size & (size - 1) == 0 == at % size
        assert size != after or size == most or at % (2 * size)
        at += size
