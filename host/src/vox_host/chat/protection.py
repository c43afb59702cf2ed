"""Keep what a message says from being read as control tokens.

The text of a special token inside a message ("<|im_end|>" typed by a user) must not end the
user's turn. Before rendering, a mark (a character that occurs nowhere else) goes in front of
every place in a message where the text of a special token begins, or could begin or end across
the message's edge. After rendering, the marks are taken out again and their positions say: the
character here is never part of a special token. Templates that compare, strip or cut messages
see the text they expect, but for those marks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from vox_host.literals import LiteralFinder

__all__ = ["ProtectedText", "Protector"]

_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Unicode noncharacters: reserved for use inside a program, never for text that is exchanged."""


@dataclass(frozen=True, slots=True)
class ProtectedText:
    """A rendered prompt; no special token covers a character at one of the `positions`."""

    text: str
    positions: tuple[int, ...] = ()


class Protector:
    """Marks values before rendering and reads the marks after it."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        specials = {token for token in special_tokens if token}
        self._specials = LiteralFinder(specials)
        # Proper beginnings and ends, for tokens that a template would complete across an edge.
        self._beginnings = {token[:n] for token in specials for n in range(1, len(token))}
        self._ends = {token[n:] for token in specials for n in range(1, len(token))}
        self._longest = max(map(len, specials), default=0)

    def protect(self, values: Sequence[Any]) -> tuple[list[Any], str | None]:
        """Return `values` with marks, and the mark that was used; None if nothing needed one."""
        if not self._specials or not any(self._needs_mark(text) for text in _strings(values)):
            return list(values), None
        mark = _unused_mark(_strings(values))
        return [self._marked(value, mark) for value in values], mark

    def _needs_mark(self, text: str) -> bool:
        return bool(self._places(text))

    def _places(self, text: str) -> list[int]:
        places = set(self._specials.starts(text))
        for n in range(1, min(len(text), self._longest - 1) + 1):
            if text[-n:] in self._beginnings:
                places.add(len(text) - n)
            if text[:n] in self._ends:
                places.add(0)
        return sorted(places)

    def _marked(self, value: Any, mark: str) -> Any:
        if isinstance(value, str):
            edges = [0, *self._places(value), len(value)]
            return mark.join(value[start:end] for start, end in pairwise(edges))
        if isinstance(value, list):
            return [self._marked(item, mark) for item in value]
        if isinstance(value, dict):
            return {self._marked(key, mark): self._marked(item, mark) for key, item in value.items()}
        return value

    @staticmethod
    def unmark(text: str, mark: str | None) -> ProtectedText:
        """Take the marks out of a rendered prompt."""
        if mark is None:
            return ProtectedText(text)
        # A template may have written the mark as a JSON escape.
        pieces = text.replace(f"\\u{ord(mark):04x}", mark).split(mark)
        positions: list[int] = []
        at = 0
        for piece in pieces[:-1]:
            at += len(piece)
            positions.append(at)
        return ProtectedText("".join(pieces), tuple(positions))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _unused_mark(texts: Iterable[str]) -> str:
    unused = dict.fromkeys(_MARKS)
    for text in texts:
        for mark in list(unused):
            if mark in text or f"\\u{ord(mark):04x}" in text:
                del unused[mark]
    for mark in unused:
        return mark
    raise ValueError("the messages hold every Unicode noncharacter; none is left to mark them with")
