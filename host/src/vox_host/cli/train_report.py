"""What a user sees of a run that goes on: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections import deque
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from vox_host.cli.output import print_line
from vox_host.counted import counted
from vox_host.training.drive import StepSeen
from vox_host.training.pace import Course
from vox_plugin_api import train_messages as t

__all__ = ["LineReport", "Speed", "TerminalReport", "make_report"]

_EVERY_S = 5.0
_RECENT = 20
_WIDE = 72
"""Columns below which a bar and a rate would leave no room for the time that is left."""


class Speed:
    """Tokens per second over the last steps."""

    def __init__(self) -> None:
        self._recent: deque[StepSeen] = deque(maxlen=_RECENT)
        self.tokens = 0
        self.seconds = 0.0

    def saw(self, seen: StepSeen) -> None:
        self._recent.append(seen)
        self.tokens += seen.tokens
        self.seconds += seen.seconds

    @property
    def tokens_per_s(self) -> float:
        return sum(seen.tokens for seen in self._recent) / max(1e-9, self.seconds_recent)

    @property
    def seconds_recent(self) -> float:
        return sum(seen.seconds for seen in self._recent)

    def eta_s(self, steps_left: int) -> float:
        """Return the seconds that so many steps would take."""
        return steps_left * self.seconds_recent / max(1, len(self._recent))


class LineReport:
    """Plain lines on stderr: the first step, then one every few seconds, every evaluation and checkpoint."""

    def __init__(self, steps: int) -> None:
        self.speed = Speed()
        self._steps = steps
        self._said_s = -_EVERY_S

    def begun(self, begun: t.TrainBeginResult, course: Course) -> None:
        self.say(begun_text(begun, course, self._steps))

    def stepped(self, seen: StepSeen) -> None:
        self.speed.saw(seen)
        now = time.monotonic()
        if now - self._said_s < _EVERY_S and seen.result.step < self._steps:
            return
        self._said_s = now
        left = self.speed.eta_s(self._steps - seen.result.step)
        self.say(
            f"step {seen.result.step}/{self._steps}  loss {seen.result.loss:.4f}  "
            f"{self.speed.tokens_per_s:.0f} tokens/s  {duration(left)} left"
        )

    def evaluated(self, course: Course, loss: float) -> None:
        self.say(evaluated_text(course, loss))

    def saved(self, folder: Path) -> None:
        self.say(f"saved {folder}")

    def close(self) -> None:
        pass

    def say(self, text: str) -> None:
        print_line(f"  {text}", error=True)


class TerminalReport(LineReport):
    """A bar with the live loss, below the lines that stay."""

    def __init__(self, steps: int, console: Console | None = None) -> None:
        """Nothing is shown yet.

        Args:
            console: where; None: this process's stderr.
        """
        super().__init__(steps)
        console = console or Console(stderr=True)
        is_wide = console.width >= _WIDE
        bar = (BarColumn(),) if is_wide else ()
        rate = "  {task.fields[rate]} tokens/s" if is_wide else ""
        self._progress = Progress(
            TextColumn("  step {task.completed:.0f}/{task.total:.0f}"),
            *bar,
            TextColumn("loss {task.fields[loss]}" + rate),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def begun(self, begun: t.TrainBeginResult, course: Course) -> None:
        super().begun(begun, course)
        self._task = self._progress.add_task("", total=self._steps, completed=course.step, loss="-", rate="-")
        self._progress.start()

    def stepped(self, seen: StepSeen) -> None:
        self.speed.saw(seen)
        if self._task is not None:
            self._progress.update(
                self._task,
                completed=seen.result.step,
                loss=f"{seen.result.loss:.4f}",
                rate=f"{self.speed.tokens_per_s:.0f}",
            )

    def saved(self, folder: Path) -> None:
        """Nothing is said: the bar shows that it goes on."""

    def close(self) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        if self._task is None:
            super().say(text)
        else:
            self._progress.console.print(f"  {text}", markup=False, highlight=False)


def make_report(steps: int) -> LineReport:
    """Return the report for this process's stderr."""
    return TerminalReport(steps) if sys.stderr.isatty() else LineReport(steps)


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
