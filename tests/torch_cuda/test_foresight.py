"""Which steps are foreseen, and how much of one is begun before it is asked for."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from mens_core.ops import BLOCK, Batch
from mens_torch_cuda.foresight import Foresight, Pace, can_be_foreseen


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def passed(pace, clock, host, rest):
    """A step that the host launched so long after the last one, and that ended so long after that."""
    clock.now += host
    pace.launch()
    clock.now += rest
    pace.end()


def test_as_many_pieces_are_begun_as_the_host_s_time_and_one_more():
    clock = Clock()
    pace = Pace(clock)
    assert pace.pieces(16) == 1  # nothing is known
    for _ in range(2):
        passed(pace, clock, 1.0, 7.0)
    assert pace.pieces(16) == 2 + 1
    assert pace.pieces(1) == 1
    passed(pace, clock, 1.0, 0.0)  # the host takes all of it
    assert pace.pieces(16) == 16


def test_what_the_host_takes_longer_counts_at_once_and_is_forgotten_slowly():
    clock = Clock()
    pace = Pace(clock)
    passed(pace, clock, 0.0, 8.0)
    passed(pace, clock, 4.0, 4.0)
    assert pace.pieces(16) == 8 + 1
    passed(pace, clock, 0.5, 7.5)
    assert pace.pieces(16) == 8 + 1  # 3.6 of 8
    for _ in range(40):
        passed(pace, clock, 0.5, 7.5)
    assert pace.pieces(16) == 1 + 1


def test_a_pause_is_not_the_host_s_time():
    clock = Clock()
    pace = Pace(clock)
    for _ in range(3):
        passed(pace, clock, 1.0, 7.0)
    pace.forget()
    passed(pace, clock, 3600.0, 7.0)
    assert pace.pieces(16) == 1
    passed(pace, clock, 1.0, 7.0)
    assert pace.pieces(16) == 2 + 1


STEP, CACHE = object(), object()


def rows(positions, tables, tokens=None) -> Batch:
    """A row of each sequence."""
    count = len(positions)
    return Batch(
        token_ids=np.array(tokens or [7] * count, np.int32),
        positions=np.array(positions, np.int32),
        starts=np.arange(count + 1, dtype=np.int32),
        block_tables=np.array(tables, np.int32),
        logit_rows=np.arange(count, dtype=np.int32),
    )


def recording(count):
    return SimpleNamespace(step=STEP, cache=CACHE, highest=np.full(count, 7, np.int32), pieces=(None,) * 4)


def met(foresight, batch):
    """What the lane does with a step; whether the next is wanted ahead, and what was begun of this one."""
    found = foresight.meet(STEP, batch, CACHE)
    foresight.launch()
    wants = foresight.wants(batch)
    if wants:
        foresight.expect(recording(len(batch.positions)), 1)
    foresight.end(recording(len(batch.positions)), batch)
    foresight.note_greed()
    return wants, found[1]


def test_several_rows_are_begun_ahead_once_three_steps_came_as_foreseen():
    foresight, tables = Foresight(), [[0], [1]]
    seen = [met(foresight, rows([at, at + 3], tables)) for at in range(10, 16)]
    assert seen == [(False, 0), (False, 0), (False, 0), (True, 0), (True, 1), (True, 1)]
    # Another token, and it begins anew.
    seen = [met(foresight, rows([at, at + 3], tables, [7, 8] if at == 16 else None)) for at in range(16, 21)]
    assert seen == [(False, 0), (False, 0), (False, 0), (True, 0), (True, 1)]


def test_one_row_is_begun_ahead_when_its_last_token_was_the_highest():
    foresight = Foresight()
    assert [met(foresight, rows([at], [[0]])) for at in (10, 11)] == [(False, 0), (True, 0)]
    assert met(foresight, rows([12], [[0]])) == (True, 1)
    foresight.meet(STEP, rows([13], [[0]]), CACHE)
    foresight.end(recording(1), rows([13], [[0]]))
    # Its token was drawn.
    foresight.meet(STEP, rows([14], [[0]]), CACHE)
    assert not foresight.wants(rows([14], [[0]]))


@pytest.mark.parametrize(
    ("tables", "is_met", "is_told"),
    [
        ([[0, 2], [1, 3]], True, False),
        ([[0, 2], [1, 4]], True, True),  # the second is at its first block
        ([[0, 2], [5, 3]], False, False),
        ([[0, 6], [1, 3]], False, False),  # the first one's second block is read
        ([[0, 2, -1], [1, 3, -1]], False, False),
    ],
)
def test_a_step_is_what_was_foreseen_if_it_reads_the_same_blocks(tables, is_met, is_told):
    foresight = Foresight()
    for at in range(10, 15):
        met(foresight, rows([BLOCK + at, at], [[0, 2], [1, 3]]))
    found, begun = foresight.meet(STEP, rows([BLOCK + 15, 15], tables), CACHE)
    assert (found is not None, begun, foresight.has_other_tables) == (is_met, int(is_met), is_told)


def test_a_row_can_be_foreseen_where_its_next_position_has_a_block():
    assert can_be_foreseen(rows([5, BLOCK - 2], [[0], [1]]))
    assert not can_be_foreseen(rows([5, BLOCK - 1], [[0], [1]]))
    assert not can_be_foreseen(rows([5, BLOCK - 1], [[0, -1], [1, -1]]))
    assert can_be_foreseen(rows([5, BLOCK - 1], [[0, -1], [1, 2]]))
    several = rows([5, 6], [[0]])
    assert not can_be_foreseen(several)
