"""Messages of the request `conformance`: run one named case on a lane's operators and show what came out.

The plugin computes and the host judges. Which bytes are right is data of the host, recorded from
the scalar reference; a plugin knows the operands of a case and nothing of the verdict.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vox_plugin_api.messages import Digest, Message

__all__ = ["CaseFault", "CaseOutput", "ConformanceParams", "ConformanceResult", "ElementType"]

ElementType = Literal["f32", "i32", "u64"]


class ConformanceParams(Message):
    """Run the case `case` of the group `group` (`operators`, `backward`, ...)."""

    group: str
    case: str
    with_bytes: bool = True
    """Whether each output's little-endian bytes follow, one binary frame per output in order."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None: as many as this process may use."""
    lane_options: dict[str, str] = Field(default_factory=dict)
    """As in `load_model`."""


class CaseOutput(Message):
    """One output of a case, in the order in which the case makes them."""

    operator: str
    """The operator that made it: "linear"."""
    shape: list[int]
    dtype: ElementType
    digest: Digest
    """SHA-256 of the little-endian, row-major bytes."""


class CaseFault(Message):
    """An operator whose output was not finite, and the rows that were not."""

    name: str
    rows: list[int]


class ConformanceResult(Message):
    """What one case made."""

    case: str
    numerics_version: int
    outputs: list[CaseOutput]
    faults: list[CaseFault] = Field(default_factory=list)
    definition: Digest | None = None
    """Which case it was: the digest of all that it asked of the lane (`mens_core.conformance.definition`).
    Two suites may give one name to two cases, and outputs of two cases can't be compared."""
    suite_version: int | None = None
    """The worker's count of changes of the cases; it tells which of two suites is the older one."""
