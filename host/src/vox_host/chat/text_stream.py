"""Turn the bytes of tokens, one after another, into text that may be shown at once.

Pure state machines, independent of how the bytes were cut into tokens: a character whose bytes
span tokens is held back until it is whole, and text that may be the beginning of a stop string
is held back until it is not. What was emitted is never taken back.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Piece", "StopScanner", "TextStream", "TokenText", "Utf8Stream"]

Entry = TypeVar("Entry")


class Utf8Stream:
    """Bytes in, text out. U+FFFD appears only for bytes that can never become a character."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def is_inside_character(self) -> bool:
        """Whether bytes wait for the rest of their character."""
        return bool(self._decoder.getstate()[0])

    def push(self, data: bytes) -> str:
        """Return the characters that `data` completes."""
        return self._decoder.decode(data)

    def finish(self) -> str:
        """Return what is left: one U+FFFD where the text ends inside a character."""
        return self._decoder.decode(b"", final=True)


def _failure_function(pattern: str) -> list[int]:
    """Return, for each prefix of `pattern`, the length of its longest proper border (Knuth-Morris-Pratt)."""
    border = [0] * len(pattern)
    k = 0
    for i in range(1, len(pattern)):
        while k and pattern[i] != pattern[k]:
            k = border[k - 1]
        if pattern[i] == pattern[k]:
            k += 1
        border[i] = k
    return border


class StopScanner:
    """Passes text through until a stop string is complete.

    The stop string that ends first wins; of several that end at the same character, the longest.
    That rule needs no text beyond the stop, so the outcome can't depend on the chunking.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("an empty stop string would stop before the first character")
        self._stops = [(stop, _failure_function(stop)) for stop in stops]
        self._matched = [0] * len(self._stops)
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def looks_for_nothing(self) -> bool:
        """Whether all text passes through as it comes."""
        return not self._stops

    def push(self, text: str) -> str:
        """Return the text that can be emitted now; nothing once stopped."""
        if self.stopped_by is not None:
            return ""
        if not self._stops:
            return text
        buffer = self._held + text
        position = len(self._held)
        for character in text:
            position += 1
            longest = 0
            for which, (stop, border) in enumerate(self._stops):
                k = self._matched[which]
                while k and stop[k] != character:
                    k = border[k - 1]
                if stop[k] == character:
                    k += 1
                if k == len(stop) and k > longest:
                    longest, self.stopped_by = k, stop
                self._matched[which] = k
            if longest:
                self._held = ""
                return buffer[: position - longest]
        keep = max(self._matched)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def finish(self) -> str:
        """Return the text that was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


class TokenText(NamedTuple, Generic[Entry]):
    """A token of the answer and the text it contributed (empty while a character is unfinished)."""

    entry: Entry
    text: str


class Piece(NamedTuple, Generic[Entry]):
    """Text to emit now, and the tokens that it completes. The texts of all tokens join to all text."""

    text: str
    tokens: tuple[TokenText[Entry], ...] = ()


@dataclass(slots=True)
class _Pending(Generic[Entry]):
    entry: Entry
    start: int
    text: str


class TextStream(Generic[Entry]):
    """`Utf8Stream` and `StopScanner` joined, remembering which token each character came from."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._utf8 = Utf8Stream()
        self._scanner = StopScanner(stops)
        self._pending: deque[_Pending[Entry]] = deque()
        self._decoded = 0
        self._emitted = 0

    @property
    def stopped_by(self) -> str | None:
        return self._scanner.stopped_by

    def push(self, data: bytes, entry: Entry) -> Piece[Entry]:
        """Take the next token's bytes; return what can be shown now."""
        text = self._utf8.push(data)
        if not self._pending and self._scanner.looks_for_nothing and not self._utf8.is_inside_character:
            # Nearly every token: what `_emit` would return, nothing being held.
            self._decoded += len(text)
            self._emitted += len(text)
            return Piece(text, (TokenText(entry, text),))
        self._pending.append(_Pending(entry, self._decoded, text))
        self._decoded += len(text)
        return self._emit(self._scanner.push(text))

    def finish(self) -> Piece[Entry]:
        """Return the rest, after the last token."""
        if self.stopped_by is not None:
            return Piece("")
        tail = self._utf8.finish()
        if self._pending:
            self._pending[-1].text += tail
        self._decoded += len(tail)
        text = self._scanner.push(tail)
        return self._emit(text + self._scanner.finish())

    def _emit(self, text: str) -> Piece[Entry]:
        self._emitted += len(text)
        done: list[TokenText[Entry]] = []
        is_stopped = self.stopped_by is not None
        while self._pending:
            token = self._pending[0]
            if is_stopped:
                if token.start >= self._emitted:
                    break
            elif token.start + len(token.text) > self._emitted:
                break
            elif len(self._pending) == 1 and self._utf8.is_inside_character:
                break  # the end of the stream may still give it a U+FFFD
            done.append(TokenText(token.entry, token.text[: self._emitted - token.start]))
            self._pending.popleft()
        if is_stopped:
            self._pending.clear()
        return Piece(text, tuple(done))
