"""Text that someone else wrote, for a terminal: it is shown, and must not command it."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str, *, keep: str = "") -> str:
    r"""Return the text with control characters, and all else that has no glyph, spelled: `\x1b`.

    Args:
        keep: characters that stay as they are, like the end of a line.
    """
    return "".join(c if c in keep or c.isprintable() else _spelled(c) for c in text)


def _spelled(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")
