"""run.json: what a run is. Written once, before the first step; a resumed run is held against it.

`bound` reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vox_host.errors import IntegrityError
from vox_host.runs.manifest import NumericsRecord
from vox_host.training.options import TrainingOptions

__all__ = [
    "DataRecord",
    "ModelRecord",
    "PluginRecord",
    "RunRecord",
    "changed_since",
    "record_digest",
    "record_text",
    "refuse_changes",
]

_HEX = r"^[0-9a-f]{64}$"


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelRecord(_Strict):
    """The base model."""

    name: str
    digest: str = Field(pattern=_HEX)


class DataRecord(_Strict):
    """A file of rows."""

    path: str
    """Absolute."""
    sha256: str = Field(pattern=_HEX)
    examples: int = Field(ge=1)
    """That are used of it."""


class PluginRecord(_Strict):
    """Who computes."""

    id: str
    version: str
    manifest_digest: str = Field(pattern=_HEX)
    tree_digest: str | None = Field(pattern=_HEX)
    """Of the installed tree; None: it lies in the host's own environment, without a receipt."""

    @property
    def digest(self) -> str:
        """What tells two of them apart."""
        return self.tree_digest or self.manifest_digest


class RunRecord(_Strict):
    """The content of run.json."""

    schema_version: Literal[2] = 2
    """1 had no digest of its own."""
    vox_host: str
    """Version."""
    model: ModelRecord
    data: DataRecord
    held_out: DataRecord | int
    """A file of its own, or how many examples of the data are never trained on."""
    template: str | None
    """SHA-256 of chat_template.jinja; None: the data needs none."""
    template_origin: str | None
    plugin: PluginRecord
    numerics: NumericsRecord
    answers: Literal["all", "last"]
    """Which answers of a conversation are learned."""
    options: TrainingOptions
    record_digest: str | None = Field(default=None, pattern=_HEX)
    """In the file: SHA-256 of its text with null here. None: in memory."""


def record_text(record: RunRecord) -> str:
    """Return the text of run.json, its own digest included."""
    return _text(record.model_copy(update={"record_digest": record_digest(record)}))


def record_digest(record: RunRecord) -> str:
    """Return the digest that stands for what the run is: SHA-256 of its text with no digest in it."""
    return hashlib.sha256(_text(record.model_copy(update={"record_digest": None})).encode()).hexdigest()


def _text(record: RunRecord) -> str:
    return json.dumps(record.model_dump(mode="json"), indent=2, ensure_ascii=False) + "\n"


def refuse_changes(run: Path, pairs: Sequence[tuple[str, str, str, str]]) -> None:
    """Refuse to go on where something is no longer what the run was begun with.

    Args:
        pairs: what, where it is, expected digest, found digest.

    Raises:
        IntegrityError: the first that differs, with both digests.
    """
    for what, where, expected, found in pairs:
        if expected != found:
            raise changed_since(run, what, where, expected, found)


def changed_since(
    run: Path, what: str, where: str, expected: str, found: str, remedy: str | None = None
) -> IntegrityError:
    """Return the error of what is not as it was when the run was begun.

    Args:
        found: a digest, or in words why there is none.
        remedy: where there is a shorter way than to bring it back.
    """
    facts: list[tuple[str, Any]] = [
        (what, where),
        ("expected", f"sha256:{expected}"),
        ("found", f"sha256:{found}" if re.fullmatch(_HEX, found) else found),
    ]
    return IntegrityError(
        f"resume-{what}-changed",
        f"the {what} is not the one that {run} was begun with; nothing was started",
        facts=facts,
        remedy=remedy or f"Bring back the {what} of then, or begin a new run: its results would be others.",
    )
