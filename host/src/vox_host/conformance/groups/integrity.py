"""The installed bytes are those of the receipt, after everything that was run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from vox_host.conformance.session import NotOfferedError, Session, case
from vox_host.conformance.verdict import CaseResult
from vox_host.integrity import verify_installation

__all__ = ["run"]


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
    """Yield the result.

    Raises:
        NotOfferedError: nothing says what the bytes should be.
    """
    if session.target.candidate.receipt is None:
        raise NotOfferedError("the plugin was not installed by vox-host: there is no receipt to compare with")
    yield await case("tree equals receipt", _verify(session))


async def _verify(session: Session) -> CaseResult | None:
    receipt = session.target.candidate.receipt
    assert receipt is not None
    await asyncio.to_thread(verify_installation, receipt, session.target.settings.plugins_dir, full=True)
    return None
