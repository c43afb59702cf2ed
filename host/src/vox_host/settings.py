"""The only reader of the environment.

Everything else is handed a frozen `Settings`. Variables are for secrets, locations and the
few documented `VOX_*` overrides; a value that can't be used is an error, never a default.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vox_host.errors import UsageError

__all__ = ["GIB", "Settings", "load_settings", "tool_environment"]

GIB = 1 << 30

_RESERVE_VARIABLE = "VOX_MENS_UNIFIED_MEM_RESERVE_GIB"
_SAFETY_VARIABLE = "VOX_MENS_VRAM_SAFETY"


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Where things are, and the few numbers a user may override."""

    home: Path
    """Data of this user: plugins, models, logs (VOX_HOME, else the platform's data folder)."""
    unified_memory_reserve_bytes: int = 12 * GIB
    """Kept free for the desktop where an accelerator shares main memory."""
    vram_safety: float = 0.88
    """The fraction of an accelerator's own memory that may be planned for."""
    api_key: str | None = None
    """What clients must send; needed to listen beyond loopback."""

    @property
    def plugins_dir(self) -> Path:
        """Receipts of installed plugins, their environments in a hidden folder beside them."""
        return self.home / "plugins"

    @property
    def models_dir(self) -> Path:
        """Imported models."""
        return self.home / "models"

    @property
    def log_dir(self) -> Path:
        """Worker logs."""
        return self.home / "log"


def load_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read `environment` (the process's own when None).

    Raises:
        UsageError: a variable's value can't be used; all of them are named.
    """
    values = os.environ if environment is None else environment
    problems: list[tuple[str, str]] = []
    home = _home(values, problems)
    reserve_gib = _number(values, _RESERVE_VARIABLE, 12.0, low=0.0, high=4096.0, problems=problems)
    safety = _number(values, _SAFETY_VARIABLE, 0.88, low=0.05, high=1.0, problems=problems)
    api_key = values.get("VOX_API_KEY")
    if api_key is not None and not api_key.strip():
        problems.append(("VOX_API_KEY", "is set but empty; unset it or give it a value"))
    if problems:
        raise UsageError(
            "bad-setting",
            "the environment holds values that can't be used; nothing was done",
            facts=problems,
            remedy="Correct or unset these variables.",
        )
    return Settings(
        home=home,
        unified_memory_reserve_bytes=int(reserve_gib * GIB),
        vram_safety=safety,
        api_key=api_key,
    )


def tool_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for the installers we start (uv, pip, the interpreter's venv).

    It is the caller's, less what would leak this process's packages into theirs. uv does not
    read pip's variables, so the two a user sets to stay on a private index are passed on.
    """
    values = dict(os.environ if environment is None else environment)
    for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "CONDA_PREFIX", "PIP_TARGET"):
        values.pop(name, None)
    if "PIP_INDEX_URL" in values and not {"UV_INDEX_URL", "UV_DEFAULT_INDEX"} & values.keys():
        values["UV_DEFAULT_INDEX"] = values["PIP_INDEX_URL"]
    if "PIP_FIND_LINKS" in values:
        values.setdefault("UV_FIND_LINKS", values["PIP_FIND_LINKS"].replace(" ", ","))
    values["PYTHONDONTWRITEBYTECODE"] = "1"
    values["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
    values["PIP_NO_INPUT"] = "1"
    return values


def _home(values: Mapping[str, str], problems: list[tuple[str, str]]) -> Path:
    text = values.get("VOX_HOME")
    if text is None:
        # Imported here: finding the platform's folder is only needed without VOX_HOME.
        from platformdirs import user_data_path

        return user_data_path("vox-host", appauthor=False)
    if not text.strip():
        problems.append(("VOX_HOME", "is set but empty; unset it or give it a folder"))
        return Path()
    home = Path(text).expanduser()
    if home.exists() and not home.is_dir():
        problems.append(("VOX_HOME", f"{text} is not a folder"))
    return home.absolute()


def _number(
    values: Mapping[str, str],
    name: str,
    default: float,
    *,
    low: float,
    high: float,
    problems: list[tuple[str, str]],
) -> float:
    text = values.get(name)
    if text is None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not low <= number <= high:
        problems.append((name, f"expected a number from {low:g} to {high:g}, found {text!r}"))
        return default
    return number
