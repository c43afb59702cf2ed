"""What is wrong with a data file, row by row, and the one error that says all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vox_host.counted import agreeing, counted
from vox_host.errors import UsageError

__all__ = ["Problem", "Problems", "data_error"]

_KEPT = 1000
_SHOWN = 100


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One row that can't be trained on."""

    line: int
    """From 1, as editors count."""
    what: str


@dataclass(slots=True)
class Problems:
    """The problems of a file: all are counted, the first thousand are kept."""

    kept: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, line: int, what: str) -> None:
        """Note one."""
        self.count += 1
        if len(self.kept) < _KEPT:
            self.kept.append(Problem(line, what))

    def joined(self, other: Problems) -> Problems:
        """Return both, by line."""
        return Problems(sorted([*self.kept, *other.kept])[:_KEPT], self.count + other.count)


def data_error(path: Path, problems: Problems) -> UsageError:
    """Return the error that shows every problem of `path` with its line, before anything is trained."""
    shown = sorted(problems.kept)[:_SHOWN]
    facts: list[tuple[str, object]] = [(f"line {problem.line}", problem.what) for problem in shown]
    if problems.count > len(shown):
        facts.append(("and", f"{problems.count - len(shown)} more"))
    rows = f"{counted(problems.count, 'row')} {agreeing(problems.count, 'is', 'are')}"
    return UsageError(
        "data-rows-bad",
        f"{rows} not fit to be trained on in {path}; nothing was trained",
        facts=facts,
        remedy=_remedy(shown),
    )


def _remedy(shown: Iterable[Problem]) -> str:
    if any("--max-length" in problem.what for problem in shown):
        return "Repair or remove these rows, or raise --max-length where only the length is wrong."
    return "Repair or remove these rows."
