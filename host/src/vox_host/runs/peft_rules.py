"""PEFT's rules: which modules a configuration asks for, and with which rank and alpha.

A module is known by its name in the model that was trained, "model.layers.0.self_attn.q_proj".

* A name of `target_modules` or `exclude_modules` fits a module that bears it whole, or behind a dot.
  A text in place of a list is a regular expression for the whole name.
* `layers_to_transform` bears on modules that a list of targets fits behind a dot: the first number
  between two dots decides, behind one of `layers_pattern` where there is one.
* The first entry of `rank_pattern` or `alpha_pattern` that fits counts: each is an expression for the
  whole name or for what follows a dot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from vox_host.runs.expressions import first_groups
from vox_host.runs.peft_config import PeftConfig

__all__ = ["PeftRules"]

Number = TypeVar("Number", int, float)

_WHOLE = "<>"
_ENTRY = "(.*\\.)?(<>)$"
_ANY_NUMBER = ".*?\\.[^.]*\\.(?P<idx>\\d+)\\."
_NUMBER_BEHIND = "(?:^|.*?\\.)<>\\.(?P<idx>\\d+)\\."


class PeftRules:
    """A configuration held against the names of modules, once."""

    def __init__(self, config: PeftConfig, modules: Sequence[str], *, source: Path) -> None:
        """Match everything that has to be matched.

        Raises:
            ModelError: `adapter-expression`.
        """
        self._config = config
        self._place = {module: place for place, module in enumerate(modules)}
        self._found: dict[tuple[str, str], list[str | None]] = {}
        asked = [(_WHOLE, whole) for whole in (config.targets, config.excluded) if isinstance(whole, str)]
        asked += [(_ENTRY, entry) for entry in (*config.ranks, *config.alphas)]
        if config.layer_numbers is not None:
            asked += [(_NUMBER_BEHIND, pattern) for pattern in config.layer_patterns] or [(_ANY_NUMBER, "")]
        if asked:
            self._found = dict(zip(asked, first_groups(asked, modules, source=source), strict=True))

    def is_wanted(self, module: str) -> bool:
        """Say whether PEFT would put an update on the module."""
        config = self._config
        excluded, targets = config.excluded, config.targets
        if excluded and self._fits(excluded, module):
            return False
        if targets is None:
            return True
        if not self._fits(targets, module):
            return False
        if isinstance(targets, str) or module in targets or config.layer_numbers is None:
            return True
        return self._number(module) in config.layer_numbers

    def rank(self, module: str) -> int:
        """Return the module's rank."""
        return self._first(self._config.ranks, module, self._config.rank)

    def alpha(self, module: str) -> float:
        """Return the module's alpha."""
        return self._first(self._config.alphas, module, self._config.alpha)

    def idle_entries(self) -> list[str]:
        """Return the entries of `rank_pattern` and `alpha_pattern` that fit no module."""
        entries = dict.fromkeys((*self._config.ranks, *self._config.alphas))
        return [entry for entry in entries if all(m is None for m in self._found[_ENTRY, entry])]

    def _fits(self, names: tuple[str, ...] | str, module: str) -> bool:
        if isinstance(names, str):
            return self._found[_WHOLE, names][self._place[module]] is not None
        return any(module == name or module.endswith(f".{name}") for name in names)

    def _number(self, module: str) -> int | None:
        patterns = self._config.layer_patterns
        for expression in [(_NUMBER_BEHIND, pattern) for pattern in patterns] or [(_ANY_NUMBER, "")]:
            number = self._found[expression][self._place[module]]
            if number is not None:
                return int(number)
        return None

    def _first(self, entries: Mapping[str, Number], module: str, otherwise: Number) -> Number:
        for entry, value in entries.items():
            if self._found[_ENTRY, entry][self._place[module]] is not None:
                return value
        return otherwise
