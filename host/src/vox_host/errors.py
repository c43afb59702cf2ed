"""Every error raised on purpose.

    VoxError                    exit 1
    +-- UsageError              exit 2   a flag, a request, a file the user named, a disk
    +-- ModelError              exit 2   a checkpoint, tokenizer or config that is malformed
    +-- NoCandidateError        exit 3   nothing can run here, or a plugin that was named is not installed
    +-- IntegrityError          exit 4   bytes differ from what was recorded
    +-- PluginError             exit 3   a manifest or an installation that is not right
    +-- WorkerFailedError       exit 5   a worker died, hung or answered with an error

An error states what failed and what did not happen, the facts (expected beside found), and
the next command. `cli` prints it, `server` maps it to a status; nobody else formats it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "IntegrityError",
    "ModelError",
    "NoCandidateError",
    "PluginError",
    "UsageError",
    "VoxError",
    "WorkerFailedError",
]


class VoxError(Exception):
    """An error with a stable code, facts in order, and a remedy."""

    exit_code = 1

    def __init__(
        self,
        code: str,
        message: str,
        *,
        facts: Sequence[tuple[str, Any]] = (),
        remedy: str | None = None,
        in_text: int | None = None,
    ) -> None:
        """Make an error.

        Args:
            in_text: how many of the facts are spelled out for a reader; the others are counted there, and are
                in the data. None: all.
        """
        super().__init__(message)
        self.code = code
        self.message = message
        self.facts = tuple(facts)
        self.remedy = remedy
        self.in_text = in_text

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON-ready data: code, message, facts, remedy."""
        return {
            "code": self.code,
            "message": self.message,
            "facts": dict(self.facts),
            "remedy": self.remedy,
        }


class UsageError(VoxError):
    """The user asked for something that can't be."""

    exit_code = 2


class ModelError(VoxError):
    """A model's files are not what they should be."""

    exit_code = 2


class PluginError(VoxError):
    """A plugin's manifest or installation is not right."""

    exit_code = 3


class NoCandidateError(VoxError):
    """No installed plugin can do this here; the facts have one line per candidate."""

    exit_code = 3


class IntegrityError(VoxError):
    """Bytes differ from what was recorded; nothing was started."""

    exit_code = 4


class WorkerFailedError(VoxError):
    """A worker died, hung, or answered with an error."""

    exit_code = 5
