"""How a number of things reads."""

from __future__ import annotations

__all__ = ["agreeing", "counted"]


def counted(count: float, one: str, many: str | None = None) -> str:
    """Return "1 row", "2 rows", "0.5 rows"; `many` is for words that take more than an s."""
    return f"{count:g} {one}" if count == 1 else f"{_digits(count)} {many or one + 's'}"


def agreeing(count: float, one: str, many: str) -> str:
    """Return the verb that goes with a number of things: "is" or "are"."""
    return one if count == 1 else many


def _digits(count: float) -> str:
    return str(count) if isinstance(count, int) else f"{count:g}"
