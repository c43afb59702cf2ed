"""What a user sees of a run that goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from vox_host.cli.output import print_line
from vox_host.counted import counted
from vox_host.training.drive import StepSeen
from vox_host.training.pace import Course, Pace
from vox_plugin_api import train_messages as t

__all__ = ["LineReport", "Speed", "TerminalReport", "make_report"]

_EVERY_S = 5.0
_RECENT = 20
_WIDE = 72
"""Columns below which a bar and a rate would leave no room for the time that is left."""


class Speed:
    """Tokens per second over the last steps, and what evaluations and saves take between them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing was seen.

        Args:
            clock: seconds, from any moment.
        """
        self._recent: deque[StepSeen] = deque(maxlen=_RECENT)
        self.tokens = 0
        self.seconds = 0.0
        """In steps alone."""
        self.evaluation_s = 0.0
        """The last evaluation; 0: there was none."""
        self.save_s = 0.0
        """The last checkpoint, published; 0: there was none."""
        self._clock = clock
        self._began: float | None = None
        self._last = 0.0

    def begin(self) -> None:
        self._began = self._last = self._clock()

    @property
    def passed(self) -> float:
        """Return the seconds from the beginning to what was seen last: steps, evaluations and saves."""
        return 0.0 if self._began is None else self._last - self._began

    def evaluated(self) -> None:
        self.evaluation_s = self._since_last()

    def saved(self) -> None:
        self.save_s = self._since_last()

    def _since_last(self) -> float:
        before, self._last = self._last, self._clock()
        return self._last - before if self._began is not None else 0.0

    def saw(self, seen: StepSeen) -> None:
        self._recent.append(seen)
        self.tokens += seen.tokens
        self.seconds += seen.seconds
        self._since_last()

    @property
    def tokens_per_s(self) -> float:
        return sum(seen.tokens for seen in self._recent) / max(1e-9, self.seconds_recent)

    @property
    def seconds_recent(self) -> float:
        return sum(seen.seconds for seen in self._recent)

    def eta_s(self, step: int, pace: Pace) -> float:
        """Return the seconds to the end once step `step` was taken, its evaluation and save included."""
        a_step = self.seconds_recent / max(1, len(self._recent))
        between = pace.evaluations_from(step) * self.evaluation_s + pace.saves_from(step) * self.save_s
        return (pace.steps - step) * a_step + between


class LineReport:
    """Plain lines on stderr: the first step, then one every few seconds, every evaluation and checkpoint."""

    def __init__(self, pace: Pace) -> None:
        self.speed = Speed()
        self._pace = pace
        self._steps = pace.steps
        self._said_s = -_EVERY_S

    def begun(self, begun: t.TrainBeginResult, course: Course) -> None:
        self.speed.begin()
        self.say(begun_text(begun, course, self._steps))

    def stepped(self, seen: StepSeen) -> None:
        self.speed.saw(seen)
        now = time.monotonic()
        if now - self._said_s < _EVERY_S and seen.result.step < self._steps:
            return
        self._said_s = now
        left = self.speed.eta_s(seen.result.step, self._pace)
        self.say(
            f"step {seen.result.step}/{self._steps}  loss {seen.result.loss:.4f}  "
            f"{self.speed.tokens_per_s:.0f} tokens/s  {duration(left)} left"
        )

    def evaluated(self, course: Course, loss: float) -> None:
        self.speed.evaluated()
        self.say(evaluated_text(course, loss))

    def saved(self, folder: Path) -> None:
        self.speed.saved()
        self.say(f"saved {folder}")

    def close(self) -> None:
        pass

    def say(self, text: str) -> None:
        print_line(f"  {text}", error=True)


class TerminalReport(LineReport):
    """A bar with the live loss, below the lines that stay."""

    def __init__(self, pace: Pace, console: Console | None = None) -> None:
        """Nothing is shown yet.

        Args:
            console: where; None: this process's stderr.
        """
        super().__init__(pace)
        console = console or Console(stderr=True)
        is_wide = console.width >= _WIDE
        bar = (BarColumn(),) if is_wide else ()
        rate = "  {task.fields[rate]} tokens/s" if is_wide else ""
        self._progress = Progress(
            TextColumn("  step {task.completed:.0f}/{task.total:.0f}"),
            *bar,
            TextColumn("loss {task.fields[loss]}" + rate),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def begun(self, begun: t.TrainBeginResult, course: Course) -> None:
        super().begun(begun, course)
        self._task = self._progress.add_task(
            "", total=self._steps, completed=course.step, loss="-", rate="-", left=""
        )
        self._progress.start()

    def stepped(self, seen: StepSeen) -> None:
        self.speed.saw(seen)
        if self._task is not None:
            self._progress.update(
                self._task,
                completed=seen.result.step,
                loss=f"{seen.result.loss:.4f}",
                rate=f"{self.speed.tokens_per_s:.0f}",
                left=duration(self.speed.eta_s(seen.result.step, self._pace)),
            )

    def saved(self, folder: Path) -> None:
        """Nothing is said: the bar shows that it goes on."""
        self.speed.saved()

    def close(self) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        if self._task is None:
            super().say(text)
        else:
            self._progress.console.print(f"  {text}", markup=False, highlight=False)


def make_report(pace: Pace) -> LineReport:
    """Return the report for this process's stderr."""
    return TerminalReport(pace) if sys.stderr.isatty() else LineReport(pace)


def begun_text(begun: t.TrainBeginResult, course: Course, steps: int) -> str:
    where = f"goes on from step {course.step}" if course.step else f"begins, {counted(steps, 'step')}"
    layers = counted(len(begun.matrices), "layer")
    return f"training {where}: {counted(begun.parameters, 'parameter')} on {layers}"


def evaluated_text(course: Course, loss: float) -> str:
    if course.step == 0:
        return f"held-out loss {loss:.4f} before the first step"
    best = "the best so far" if course.best_step == course.step else f"best {course.best_loss:.4f}"
    return f"step {course.step}: held-out loss {loss:.4f} ({best})"


def duration(seconds: float) -> str:
    """Return a time as people say it: 42 s, 3 min 5 s, 2 h 4 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
