"""How much of a step is begun before it is asked for."""

from __future__ import annotations

from mens_torch_cuda.foresight import Pace


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
