"""What is compared: a plugin, the way it computes, or what another machine certified (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vox_host.errors import UsageError

__all__ = ["Side", "parse_sides"]


@dataclass(frozen=True, slots=True)
class Side:
    """One plugin and its lane options."""

    label: str
    """As it was written, made unique: "mens-cpu-ref:isa=avx2"."""
    plugin: str
    lane_options: Mapping[str, str] = field(default_factory=dict)


def parse_sides(words: Sequence[str]) -> list[Side]:
    """Return the sides that `ID` or `ID:NAME=VALUE,NAME=VALUE` name; one alone is run twice.

    Raises:
        UsageError: a word is something else.
    """
    sides: list[Side] = []
    for word in words:
        plugin, colon, text = word.partition(":")
        options: dict[str, str] = {}
        for part in text.split(",") if colon else []:
            name, equals, value = part.partition("=")
            if not (plugin and name and equals and value) or name in options:
                raise UsageError(
                    "usage",
                    f"--plugin is ID or ID:NAME=VALUE,...; found {word!r}; nothing was started",
                    remedy="For example --plugin mens-cpu-ref:isa=avx2.",
                )
            options[name] = value
        seen = sum(side.label.split(" #")[0] == word for side in sides)
        sides.append(Side(f"{word} #{seen + 1}" if seen else word, plugin, options))
    return sides
