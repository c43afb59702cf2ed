"""The backward of the forward's operators, byte for byte: a wrong gradient of a right forward ends here."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from vox_host.conformance.groups.operators import run_group
from vox_host.conformance.session import Session
from vox_host.conformance.verdict import CaseResult

__all__ = ["run"]


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield one result per recorded case.

    Raises:
        NotOfferedError: the plugin does not train, promises no bits, or shows no operators.
    """
    session.require("train")
    async for result in run_group(session, "backward"):
        yield result
