"""What follows from a step's number alone, and from the evaluations so far."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vox_host.training.data import order
from vox_host.training.pace import (
    Course,
    Pace,
    Scored,
    batch_of,
    checkpoints_to_keep,
    mean_loss,
    steps_per_epoch,
)

CASES = Path(__file__).parents[2] / "cases" / "hand" / "training"
PACE = Pace(steps=20, eval_every=4, save_every=3, keep_last=2, patience=2)


@pytest.mark.parametrize("case", json.loads((CASES / "R1_accum.json").read_text()))
def test_a_windows_loss_is_the_mean_over_its_tokens_and_the_last_window_may_be_short(case):
    window, rows = case["window"], [Scored(loss, tokens) for loss, tokens in case["rows"]]
    steps = steps_per_epoch(len(rows), window)
    found = [
        mean_loss(
            [
                rows[index]
                for index in batch_of(
                    step, examples=len(rows), batch_size=window, seed=0, order=lambda *a: range(a[2])
                )[1]
            ]
        )
        for step in range(steps)
    ]
    assert found == case["losses"]
    # The mean of the rows' own means is what this must not be.
    assert case.get("wrong") not in found


def test_a_mean_does_not_depend_on_the_order_of_the_sum():
    scores = [Scored(2.0**60, 1), Scored(1.0, 1), Scored(-(2.0**60), 1), Scored(3.0, 1)]
    assert mean_loss(scores) == mean_loss(scores[::-1]) == 1.0
    with pytest.raises(ValueError, match="no trained token"):
        mean_loss([Scored(0.0, 0)])


def test_every_epoch_takes_every_example_once_in_an_order_of_its_own():
    taken = [
        batch_of(step, examples=7, batch_size=3, seed=5, order=order)
        for step in range(2 * steps_per_epoch(7, 3))
    ]
    assert [epoch for epoch, _ in taken] == [0, 0, 0, 1, 1, 1]
    assert [len(indices) for _, indices in taken] == [3, 3, 1, 3, 3, 1]
    first, second = ([i for e, batch in taken if e == epoch for i in batch] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(7))
    assert first != second


def test_the_evaluation_before_the_first_step_is_no_candidate_for_the_best():
    course = Course().evaluated(0.5)
    assert (course.first_loss, course.best_step) == (0.5, None)
    course = course.stepped().evaluated(0.9)
    assert (course.best_loss, course.best_step) == (0.9, 1)


def test_a_run_ends_after_so_many_evaluations_without_gain_and_an_equal_one_is_no_gain():
    course = Course(step=4).evaluated(1.0)
    course = course.stepped().evaluated(1.0)
    assert (course.without_gain, course.end(PACE)) == (1, None)
    assert course.evaluated(0.9).without_gain == 0
    course = course.stepped().evaluated(1.1)
    assert course.end(PACE) == "patience"
    assert (course.best_step, course.best_loss) == (4, 1.0)
    assert Course(step=20).end(PACE) == "steps"


def test_the_end_is_evaluated_and_saved_whatever_the_rhythm():
    assert [step for step in range(1, 21) if PACE.is_evaluation_due(step)] == [4, 8, 12, 16, 20]
    assert [step for step in range(1, 21) if PACE.is_save_due(step)] == [3, 6, 9, 12, 15, 18, 20]


def test_the_last_ones_that_were_due_are_kept_and_the_best_and_the_newest():
    assert checkpoints_to_keep({3, 6, 9}, PACE, best=3) == {3, 6, 9}
    assert checkpoints_to_keep({3, 6, 9, 12}, PACE, best=3) == {3, 9, 12}
    # 10 was made by an interruption: it goes once there is a newer one.
    assert checkpoints_to_keep({6, 9, 10}, PACE, best=None) == {6, 9, 10}
    assert checkpoints_to_keep({6, 9, 10, 12}, PACE, best=None) == {9, 12}
    assert checkpoints_to_keep({4, 6, 9, 12}, PACE, best=4) == {4, 9, 12}
