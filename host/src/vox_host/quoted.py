"""A path within a command that a user is told to type."""

from __future__ import annotations

import shlex
from pathlib import Path

__all__ = ["quoted"]


def quoted(path: Path | str) -> str:
    """Return the path as a shell takes it for one word."""
    return shlex.quote(str(path))
