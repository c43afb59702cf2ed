"""Find which of many literal texts begin where.

A regular expression with thousands of alternatives tries them one by one at every candidate,
and holds the interpreter's lock meanwhile; here a candidate costs one look-up per length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

__all__ = ["LiteralFinder"]


class LiteralFinder:
    """A fixed set of non-empty texts to look for."""

    def __init__(self, literals: Iterable[str]) -> None:
        self._literals = frozenset(literals) - {""}
        self._lengths = sorted({len(literal) for literal in self._literals}, reverse=True)
        first = "".join(sorted({literal[0] for literal in self._literals}))
        self._candidate = re.compile(f"[{re.escape(first)}]") if first else None

    def __bool__(self) -> bool:
        return bool(self._literals)

    def at(self, text: str, position: int) -> Iterator[str]:
        """Yield the literals that begin at `position`, longest first."""
        for length in self._lengths:
            piece = text[position : position + length]
            if len(piece) == length and piece in self._literals:
                yield piece

    def starts(self, text: str, position: int = 0) -> Iterator[int]:
        """Yield the positions from `position` on where at least one literal begins."""
        if self._candidate is None:
            return
        for found in self._candidate.finditer(text, position):
            if next(self.at(text, found.start()), None) is not None:
                yield found.start()
