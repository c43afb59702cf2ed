"""Typed values out of a parsed JSON object, with every problem collected.

A reader asks for what it needs; a value of the wrong type or size is noted as a problem that
names its key and value, a stand-in is returned, and `raise_problems` ends the reading with one
error. Keys that nobody asks for are the reader's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any, Final, TypeVar

from vox_plugin_api.strict_json import CheckpointError

__all__ = ["REQUIRED", "Fields"]


_T = TypeVar("_T")


class _Required:
    pass


REQUIRED: Final = _Required()
"""As a default: the key must be there."""


class Fields:
    """One JSON object at a dotted path within `source`; children share its problems."""

    def __init__(self, data: Mapping[str, Any], *, source: str, path: str = "") -> None:
        self.data = data
        self.source = source
        self.path = path
        self.problems: list[str] = []
        self.notes: list[str] = []

    def child(self, key: str) -> Fields | None:
        """The object under `key`, or None where it is absent or null."""
        value = self.data.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.problem(key, "an object")
            return None
        below = Fields(value, source=self.source, path=f"{self.path}{key}.")
        below.problems, below.notes = self.problems, self.notes
        return below

    def has(self, key: str) -> bool:
        """Whether `key` is there and not null."""
        return self.data.get(key) is not None

    def first_of(self, *keys: str) -> str:
        """The first of several spellings that is there, or else the first."""
        return next((key for key in keys if self.has(key)), keys[0])

    def integer(
        self, key: str, default: int | _Required = REQUIRED, *, minimum: int = 1, maximum: int = 2**31 - 1
    ) -> int:
        """A whole number; true is not one."""
        if not self.has(key):
            return self._absent(key, default, minimum)
        value = self.data[key]
        if type(value) is not int or not minimum <= value <= maximum:
            self.problem(key, f"a whole number from {minimum} to {maximum}")
            return minimum
        return value

    def number(
        self,
        key: str,
        default: Fraction | _Required = REQUIRED,
        *,
        above: Fraction = Fraction(0),
        below: Fraction = Fraction(2**64),
    ) -> Fraction:
        """A number strictly between two bounds: the exact value of the float64 nearest to the text."""
        if not self.has(key):
            return self._absent(key, default, Fraction(1))
        value = self.data[key]
        is_number = type(value) is int or (type(value) is float and abs(value) < float("inf"))
        if not is_number or not above < Fraction(value) < below:
            self.problem(key, f"a number above {float(above):g} and below {float(below):g}")
            return above + 1
        return Fraction(value)

    def boolean(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.data.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.problem(key, "true or false")
            return default
        return value

    def text(self, key: str) -> str | None:
        """A string, or None where it is absent or null."""
        value = self.data.get(key)
        if value is not None and not isinstance(value, str):
            self.problem(key, "a string")
            return None
        return value

    def problem(self, key: str, wanted: str) -> None:
        """Note that the value under `key` is not what is wanted."""
        found = f"is {self.data[key]!r:.80}" if key in self.data else "is missing"
        self.problems.append(f"{self.path}{key} {found}; wanted {wanted}")

    def note(self, text: str) -> None:
        """Note something that the user should know although it stops nothing."""
        self.notes.append(text)

    def raise_problems(self, code: str) -> None:
        """Raise one error with every problem, if there is any."""
        if self.problems:
            raise CheckpointError(
                code,
                f"{self.source}: {'; '.join(self.problems)}",
                facts={"problems": list(self.problems)},
                # Never "correct it": a config that is changed to please describes other weights.
                remedy=f"Fetch {self.source} again from where the model came from; if it is the original, "
                "this model needs what is not supported: choose another one.",
            )

    def _absent(self, key: str, default: _T | _Required, stand_in: _T) -> _T:
        if isinstance(default, _Required):
            self.problem(key, "it to be given")
            return stand_in
        return default
