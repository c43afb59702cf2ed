"""The texts that accuracy is measured on.

Three long ones (`fixtures/text`) and 95 short ones (`fixtures/passages.txt`) of many kinds and
languages, each a sequence of its own: the error of a quantised model is shared within a
sequence, so what counts for an interval is the number of sequences. All were written for this
project and are under its licence, except the passages marked as public domain with author and year.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["long_texts", "passages"]

_FIXTURES = Path(__file__).parents[1] / "fixtures"
_HEADING = re.compile(r"(?m)^# ([a-z-]+) \((.+)\)\n")


def long_texts() -> dict[str, str]:
    """Return the long texts by name."""
    return {path.stem: path.read_text() for path in sorted((_FIXTURES / "text").glob("*.txt"))}


def passages() -> dict[str, str]:
    """Return the short texts by name, in the file's order."""
    parts = _HEADING.split((_FIXTURES / "passages.txt").read_text())[1:]
    return {name: text.strip() for name, text in zip(parts[::3], parts[2::3], strict=True)}
