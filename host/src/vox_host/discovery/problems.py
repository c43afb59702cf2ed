"""An error met while finding a plugin, as the problem of a candidate."""

from __future__ import annotations

from vox_host.errors import VoxError
from vox_host.resolution import Problem, Stage

__all__ = ["as_problem"]


def as_problem(error: VoxError | OSError, prefix: str = "") -> Problem:
    """Return what a candidate can't be used for, from the error that said so."""
    if isinstance(error, OSError):
        return Problem(stage="found", code="unreadable", detail=f"{prefix}{error.filename}: {error.strerror}")
    # A receipt that can't be read vouches for nothing: the same as bytes that changed.
    stages: dict[str, Stage] = {"manifest": "manifest", "receipt": "integrity"}
    stage = stages.get(error.code.split("-")[0], "found")
    facts = "".join(f"; {name} {value}" for name, value in error.facts)
    return Problem(
        stage=stage, code=error.code, detail=f"{prefix}{error.message}{facts}", remedy=error.remedy
    )
