"""What is wrong with a data file, row by row, and the one error that says all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vox_host.counted import agreeing, counted
from vox_host.errors import UsageError

__all__ = ["Problem", "Problems", "data_error"]

_KEPT = 100_000
_IN_TEXT = 20


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """One row that can't be trained on."""

    line: int
    """From 1, as editors count."""
    what: str


@dataclass(slots=True)
class Problems:
    """The problems of a file: all are counted, the first hundred thousand are kept."""

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
    """Return the error that has every problem of `path` with its line, before anything is trained.

    A text shows the first twenty.
    """
    kept = sorted(problems.kept)
    facts: list[tuple[str, object]] = [(f"line {problem.line}", problem.what) for problem in kept]
    if problems.count > len(kept):
        facts.append(("beyond these", f"{problems.count - len(kept)} more, counted alone"))
    rows = f"{counted(problems.count, 'row')} {agreeing(problems.count, 'is', 'are')}"
    return UsageError(
        "data-rows-bad",
        f"{rows} not fit to be trained on in {path}; nothing was trained",
        facts=facts,
        remedy=_remedy(kept),
        in_text=_IN_TEXT,
    )


def _remedy(problems: Iterable[Problem]) -> str:
    if any("--max-length" in problem.what for problem in problems):
        return "Repair or remove these rows, or raise --max-length where only the length is wrong."
    return "Repair or remove these rows."
