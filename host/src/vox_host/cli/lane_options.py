"""Lane options on the command line: NAME=VALUE."""

from __future__ import annotations

from collections.abc import Sequence

from vox_host.errors import UsageError

__all__ = ["parse_lane_options"]


def parse_lane_options(words: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE words as a dictionary.

    Raises:
        UsageError: a word is something else, or a name comes twice.
    """
    options: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or not name or not value or name in options:
            raise UsageError(
                "usage", f"a lane option is NAME=VALUE, each name once; found {word!r}; nothing was started"
            )
        options[name] = value
    return options
