"""The first difference is found, and what was not compared did not pass."""

from __future__ import annotations

import struct

import pytest

from vox_host.conformance.compare import Difference, first_difference
from vox_host.conformance.grading import grade_rows
from vox_host.conformance.verdict import CaseResult, GroupResult, Report, worst
from vox_plugin_api.messages import f32_bits


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def test_equal_bytes_have_no_difference():
    assert first_difference(floats(1, 2), floats(1, 2), dtype="f32", shape=(2,), operator="add") is None


def test_the_first_differing_element_is_shown_with_both_bit_patterns():
    found = first_difference(
        floats(1, 2, 3, -0.0, 5, 6), floats(1, 2, 3, 0.0, 5, 7), dtype="f32", shape=(2, 3), operator="add"
    )
    assert found is not None
    assert (found.element, found.index) == (3, (1, 0))
    assert (found.expected, found.found) == ("80000000", "00000000")
    assert (found.differing, found.elements) == (2, 6)


def test_wide_integers_are_compared_whole():
    a, b = struct.pack("<2Q", 1, 2**32), struct.pack("<2Q", 1, 2**33)
    found = first_difference(a, b, dtype="u64", shape=(2,), operator="token_weights")
    assert found is not None
    assert (found.element, found.expected, found.found) == (1, "0000000100000000", "0000000200000000")


def test_another_length_is_a_difference():
    found = first_difference(floats(1, 2), floats(1), dtype="f32", shape=(2,), operator="add")
    assert found is not None
    assert (found.expected, found.found) == ("2 elements", "1 elements")


# --- verdicts ------------------------------------------------------------------------------------

PASSED = CaseResult(name="a", grade="bitwise")
FAILED = CaseResult(name="b", grade="failed", difference=Difference(operator="add", expected="1", found="2"))
SKIPPED = CaseResult(name="c", is_skipped=True, detail="why")
UNGRADED = CaseResult(name="d")


def report(*groups: GroupResult, is_complete: bool = True) -> Report:
    return Report(
        plugin="p",
        plugin_version="1",
        lane="cpu",
        plugin_tree_digest=None,
        numerics=("canonical",),
        numerics_version=1,
        suite_digest="0" * 64,
        groups=groups,
        is_complete=is_complete,
    )


@pytest.mark.parametrize(
    ("groups", "is_complete", "verdict"),
    [
        ((), True, "failed"),
        ((GroupResult(name="g"),), True, "failed"),
        ((GroupResult(name="g", cases=(SKIPPED,)),), True, "failed"),
        ((GroupResult(name="g", skipped="why"),), True, "failed"),
        ((GroupResult(name="g", cases=(PASSED,)),), True, "bitwise"),
        ((GroupResult(name="g", cases=(PASSED, SKIPPED)),), True, "bitwise"),
        ((GroupResult(name="g", cases=(PASSED, FAILED)),), True, "failed"),
        ((GroupResult(name="g", cases=(PASSED,)), GroupResult(name="h", skipped="why")), True, "bitwise"),
        (
            (
                GroupResult(name="g", cases=(PASSED,)),
                GroupResult(name="h", skipped="why", was_asked_for=True),
            ),
            False,
            "failed",
        ),
        ((GroupResult(name="g", cases=(UNGRADED,)),), True, "failed"),
        ((GroupResult(name="g", cases=(UNGRADED,)),), False, "passed"),
        ((GroupResult(name="g", cases=(UNGRADED, FAILED)),), False, "failed"),
    ],
)
def test_a_grade_is_earned(groups, is_complete, verdict):
    assert report(*groups, is_complete=is_complete).verdict == verdict


def test_the_report_counts_and_names_the_first_difference():
    facts = report(
        GroupResult(name="g", cases=(PASSED, SKIPPED)), GroupResult(name="h", cases=(FAILED,))
    ).as_dict()
    assert (facts["cases"], facts["failed"]) == (2, 1)
    assert facts["skipped"] == [{"group": "g", "case": "c", "reason": "why"}]
    assert facts["first_difference"]["operator"] == "add"


def test_the_worst_grade_counts():
    assert worst(["bitwise", None, "within tolerance", "same tokens"]) == "within tolerance"
    assert worst([None]) is None


# --- grading -------------------------------------------------------------------------------------


def row(token: int, logprob: float) -> list:
    return [token, f32_bits(logprob), []]


def test_with_canonical_numerics_one_bit_of_a_logprob_fails():
    graded = grade_rows([row(1, -1.0)], [[1, "bf800001", []]], group="g", case="c")
    assert graded.grade == "failed"
    assert graded.difference is not None
    assert graded.difference.element == 0
    assert "bf800000" in graded.difference.expected and "bf800001" in graded.difference.found


@pytest.mark.parametrize(
    ("found", "grade"),
    [
        ([row(1, -1.0), row(2, -2.0)], "bitwise"),
        ([row(1, -1.05), row(2, -2.0)], "same tokens"),
        ([row(1, -1.2), row(2, -2.0)], "failed"),  # a logprob too far off
        ([row(1, -1.0), row(3, -2.0)], "within tolerance"),  # the reference was undecided there
        ([row(3, -1.0), row(2, -2.0)], "failed"),  # and here it was not
        ([row(1, -1.0)], "within tolerance"),  # it stopped where the reference was undecided
        ([], "failed"),
    ],
)
def test_other_numerics_are_graded(found, grade):
    expected = [row(1, -1.0), row(2, -2.0)]
    margins = [f32_bits(1.0), f32_bits(0.15)]
    assert grade_rows(expected, found, group="g", case="c", tolerance=0.1, margins=margins).grade == grade
