"""What the cases of a check came to (pure).

A grade is earned: nothing that was not run counts for anything, and no case at all is a failure. A
case that is not the recorded one was run and compared with nothing: it is counted apart, and as long as
there is one, no better verdict than *not comparable* is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from vox_host.conformance.compare import Difference

__all__ = ["CaseResult", "GroupResult", "Report", "Verdict", "worst"]

Verdict = Literal["passed", "bitwise", "same tokens", "within tolerance", "not comparable", "failed"]
_COMPARED: tuple[Verdict, ...] = ("bitwise", "same tokens", "within tolerance")
_ORDER: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseResult:
    """One case: what it was, and what it earned."""

    name: str
    grade: Verdict | None = None
    """None: it has no part in the grade (a worker that dies well computes nothing), and passed."""
    is_skipped: bool = False
    detail: str = ""
    difference: Difference | None = None
    is_hang: bool = False
    """Failed because no answer came: the next case would wait as long."""

    @property
    def is_failed(self) -> bool:
        return self.grade == "failed"

    @property
    def is_not_comparable(self) -> bool:
        return self.grade == "not comparable"

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        status = "skipped" if self.is_skipped else "failed" if self.is_failed else "passed"
        status = "not comparable" if self.is_not_comparable else status
        return {
            "name": self.name,
            "status": status,
            "grade": self.grade,
            "detail": self.detail,
            "difference": self.difference.as_dict() if self.difference else None,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupResult:
    """One group of cases."""

    name: str
    cases: tuple[CaseResult, ...] = ()
    skipped: str | None = None
    """Why the whole group was not run."""
    was_asked_for: bool = False
    """By name: then not having run is a failure."""

    @property
    def run(self) -> int:
        return sum(not case.is_skipped for case in self.cases)

    @property
    def failed(self) -> int:
        return sum(case.is_failed for case in self.cases)

    @property
    def not_comparable(self) -> int:
        return sum(case.is_not_comparable for case in self.cases)

    @property
    def verdict(self) -> Verdict | None:
        """The group's grade; None where it was skipped or grades nothing."""
        if self.run == 0:
            return "failed" if self.was_asked_for or self.skipped is None else None
        return worst(case.grade for case in self.cases if not case.is_skipped)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "name": self.name,
            "verdict": self.verdict,
            "cases": self.run,
            "failed": self.failed,
            "not_comparable": self.not_comparable,
            "skipped": sum(case.is_skipped for case in self.cases),
            "skipped_because": self.skipped,
            "results": [case.as_dict() for case in self.cases],
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A whole check."""

    plugin: str
    plugin_version: str
    lane: str
    execution: str | None = None
    """Where the lane's kernels ran, if not on the device that its name says."""
    plugin_tree_digest: str | None
    numerics: tuple[str, ...]
    numerics_version: int
    suite_digest: str
    groups: tuple[GroupResult, ...]
    is_complete: bool
    """Whether every group was asked for; only then is the verdict one about the plugin."""
    tolerance: str = ""
    observation: dict[str, Any] = field(default_factory=dict)

    @property
    def cases(self) -> int:
        return sum(group.run for group in self.groups)

    @property
    def failed(self) -> int:
        return sum(group.failed for group in self.groups)

    @property
    def not_comparable(self) -> int:
        return sum(group.not_comparable for group in self.groups)

    @property
    def verdict(self) -> Verdict:
        """The worst grade of any group. Without one case it is *failed*; so is a check in which nothing
        was comparable, and a whole one in which nothing compared results. *passed* is left for a part
        that grades nothing."""
        if self.cases == 0:
            return "failed"
        if self.not_comparable and not any(
            case.grade in _COMPARED for group in self.groups for case in group.cases
        ):
            return "failed"
        graded = worst(group.verdict for group in self.groups)
        if graded is None:
            return "failed" if self.is_complete else "passed"
        return graded

    @property
    def first_difference(self) -> Difference | None:
        found = (case.difference for group in self.groups for case in group.cases)
        return next((difference for difference in found if difference is not None), None)

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        first = self.first_difference
        return {
            "verdict": self.verdict,
            "cases": self.cases,
            "failed": self.failed,
            "not_comparable": self.not_comparable,
            "skipped": [
                {"group": group.name, "reason": group.skipped}
                for group in self.groups
                if group.skipped is not None
            ]
            + [
                {"group": group.name, "case": case.name, "reason": case.detail}
                for group in self.groups
                for case in group.cases
                if case.is_skipped
            ],
            "plugin": self.plugin,
            "plugin_version": self.plugin_version,
            "lane": self.lane,
            "execution": self.execution,
            "plugin_tree_digest": self.plugin_tree_digest,
            "numerics": list(self.numerics),
            "numerics_version": self.numerics_version,
            "suite_digest": self.suite_digest,
            "is_complete": self.is_complete,
            "tolerance": self.tolerance or None,
            "first_difference": first.as_dict() if first else None,
            "groups": [group.as_dict() for group in self.groups],
            "observation": self.observation,
        }


def worst(grades: Iterable[Verdict | None]) -> Verdict | None:
    """Return the lowest grade; None where there is none."""
    found: Sequence[Verdict] = [grade for grade in grades if grade is not None]
    return max(found, key=_ORDER.index, default=None)
