"""What is read of a step's logits is each wish's own row, whatever order the wishes come in."""

from __future__ import annotations

import numpy as np

from lanes.numpy_training import NumpyTrainingLane
from mens_core.ops import Fault
from mens_core.wishes import Penalty, Wish, read_logits


def a_penalty(*tokens: int, by: float = 1.5) -> Penalty:
    ids = np.array(tokens, np.int32)
    return Penalty(ids, np.full(len(ids), by, np.float32), np.full(len(ids), 0.25, np.float32))


def draw(weights) -> int:
    """Tells the weights of one row and temperature from another's."""
    return int(weights.astype(object).sum() % 1009)


def test_a_wish_is_of_its_own_row():
    ops = NumpyTrainingLane()
    plain = np.random.default_rng(5).standard_normal((6, 40)).astype(np.float32)
    top = [int(row.argmax()) for row in plain]
    wishes = [
        Wish(4, is_scored=True, penalty=a_penalty(top[4], 3), is_chosen=True),
        Wish(0, is_chosen=True, draw=draw, temperature=0.5),
        Wish(5, is_scored=True),
        Wish(2, penalty=a_penalty(top[2], by=2), is_chosen=True, draw=draw, temperature=2.0),
        Wish(1, is_scored=True, is_chosen=True),
        Wish(3, penalty=a_penalty(top[3], 7, by=3), is_chosen=True),
    ]
    made = read_logits(ops, ops.from_host(plain.copy()), wishes)
    for wish, reading in zip(wishes, made, strict=True):
        row = ops.from_host(plain[wish.row : wish.row + 1].copy())
        assert reading.fault is None and (reading.logits is None) == (not wish.is_scored)
        if reading.logits is not None:
            # Of the logits as the model made them, penalised or not.
            assert reading.logits.tobytes() == plain[wish.row].tobytes()
            assert reading.normaliser == ops.log_normaliser(row)[0]
        if wish.penalty is not None:
            ids, repetition, subtract = wish.penalty
            ops.penalise(row, 0, ids, repetition=repetition, subtract=subtract)
        if wish.draw is not None:
            assert reading.token_id == draw(ops.token_weights(row, 0, wish.temperature))
        else:
            assert reading.token_id == (int(ops.argmax(row)[0]) if wish.is_chosen else None)


class WatchedLane(NumpyTrainingLane):
    """Says of which rows a result is not finite, as lanes do that look."""

    def __init__(self):
        super().__init__()
        self.found = []

    def take_faults(self):
        found, self.found = self.found, []
        return found

    def log_normaliser(self, logits):
        bad = ~np.isfinite(logits).all(axis=1)
        self.found += [Fault("log_normaliser", (int(row),)) for row in np.flatnonzero(bad)]
        return super().log_normaliser(np.where(bad[:, None], np.float32(0), logits))

    def penalise(self, logits, row, token_ids, *, repetition, subtract):
        with np.errstate(over="ignore"):
            super().penalise(logits, row, token_ids, repetition=repetition, subtract=subtract)
        if not np.isfinite(logits[row]).all():
            self.found.append(Fault("penalise", (row,)))


class ViewingLane(NumpyTrainingLane):
    """All rows in their order are no copy, as a lane may have it."""

    def take_rows(self, x, rows):
        return x if rows.tolist() == list(range(len(x))) else super().take_rows(x, rows)

    def to_host(self, x):
        return x


def test_a_penalty_does_not_reach_what_was_scored_before_it():
    ops = ViewingLane()
    plain = np.random.default_rng(7).standard_normal((2, 40)).astype(np.float32)
    logits = plain.copy()
    wishes = [Wish(i, is_scored=True, penalty=a_penalty(3, 5)) for i in range(2)]
    made = read_logits(ops, logits, wishes)
    assert [reading.logits.tobytes() for reading in made] == [row.tobytes() for row in plain]
    assert logits.tobytes() != plain.tobytes(), "the logits themselves are changed"


def undrawn(weights) -> int:
    raise AssertionError("a spoiled wish draws nothing")


def test_a_row_that_is_not_finite_spoils_its_own_wish():
    ops = WatchedLane()
    plain = np.random.default_rng(6).standard_normal((4, 40)).astype(np.float32)
    plain[3, 8], plain[1, 8] = np.inf, 3e38
    steep = a_penalty(8, by=1e-3)
    made = read_logits(
        ops,
        ops.from_host(plain),
        [
            Wish(0, is_chosen=True),
            Wish(3, is_scored=True, is_chosen=True, draw=undrawn),
            Wish(1, penalty=steep, is_chosen=True),
            Wish(2, penalty=steep, is_chosen=True),
        ],
    )
    assert [reading.fault for reading in made] == [None, "log_normaliser", "penalise", None]
    assert [reading.token_id is None for reading in made] == [False, True, True, False]
