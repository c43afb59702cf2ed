"""Every operator of the lane, on operands chosen to show the classic mistakes, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

from vox_host.conformance.compare import Difference, first_difference
from vox_host.conformance.expected import ExpectedCase, load_group
from vox_host.conformance.session import NotOfferedError, Session, case, failed, in_time
from vox_host.conformance.verdict import CaseResult
from vox_host.errors import VoxError
from vox_host.workers import Event, Worker
from vox_plugin_api.conformance_messages import ConformanceParams, ConformanceResult

__all__ = ["compare_case", "run", "run_group"]

_UNKNOWN = ("not-supported", "invalid-request", "unknown-group")


async def run(session: Session) -> AsyncIterator[CaseResult]:
    """Yield one result per case of the group `operators`."""
    async for result in run_group(session, "operators"):
        yield result


async def run_group(session: Session, group: str) -> AsyncIterator[CaseResult]:
    """Yield one result per recorded case of `group`.

    Raises:
        NotOfferedError: the plugin promises no bits, or shows no operators.
    """
    if not session.is_canonical:
        raise NotOfferedError("the plugin has its own numerics (fast), which promise no bits of an operator")
    version, cases = load_group(group)
    has_answered = False
    async with session.worker("check") as worker:
        for expected in cases:
            try:
                event = await _ask(session, worker, group, expected.name)
            except VoxError as error:
                if error.code in _UNKNOWN and not has_answered:
                    raise NotOfferedError(
                        f"the plugin shows none of these operators ({error.code})"
                    ) from None
                yield CaseResult(name=expected.name, grade="failed", detail=f"{error.code}: {error.message}")
                if worker.ended.done():
                    yield CaseResult(
                        name="worker", grade="failed", detail="the worker ended; cases after it were not run"
                    )
                    return
                continue
            except TimeoutError:
                yield CaseResult(name=expected.name, grade="failed", detail="no answer in time")
                return
            has_answered = True
            yield await case(expected.name, _judge(group, version, expected, event), "bitwise")


async def _ask(session: Session, worker: Worker, group: str, name: str) -> Event:
    target = session.target
    params = ConformanceParams(
        group=group, case=name, threads=target.threads, lane_options=dict(target.lane_options)
    )
    event: Event = await in_time(worker.call("conformance", params))
    return event


async def _judge(group: str, version: int, expected: ExpectedCase, event: Event) -> CaseResult | None:
    result = ConformanceResult.model_validate(event.result)
    if result.numerics_version != version:
        return failed(f"it computes numerics {result.numerics_version}, this suite is of numerics {version}")
    difference = compare_case(expected, result, event.payloads)
    if difference is None:
        return None
    placed = Difference(**{**difference.as_dict(), "group": group, "case": expected.name})
    return failed(str(placed), placed)


def compare_case(
    expected: ExpectedCase, result: ConformanceResult, payloads: tuple[bytes, ...]
) -> Difference | None:
    """Return where the outputs of a case stop being the expected ones; None: nowhere.

    The bytes decide. A digest that the plugin states of them must be theirs.
    """
    operator = expected.name.split("/")[0]
    if not len(result.outputs) == len(payloads) == len(expected.outputs):
        return Difference(
            operator=operator,
            name="outputs",
            expected=str(len(expected.outputs)),
            found=f"{len(result.outputs)} with {len(payloads)} frames",
        )
    for number, (wanted, stated, payload) in enumerate(
        zip(expected.outputs, result.outputs, payloads, strict=True)
    ):
        name = f"output {number}"
        kind = f"{wanted.dtype} {list(wanted.shape)}"
        if (found := f"{stated.dtype} {stated.shape}") != kind:
            return Difference(operator=wanted.operator, name=name, expected=kind, found=found)
        if wanted.data is None:
            raise AssertionError("the bytes of every operator case are recorded")
        difference = first_difference(
            wanted.data,
            payload,
            dtype=wanted.dtype,
            shape=wanted.shape,
            operator=wanted.operator,
            name=name,
        )
        if difference is not None:
            return difference
        if stated.digest != hashlib.sha256(payload).hexdigest():
            return Difference(
                operator=wanted.operator,
                name=f"digest of {name}",
                expected=wanted.digest,
                found=stated.digest,
            )
    faults = tuple((fault.name, tuple(fault.rows)) for fault in result.faults)
    if faults != expected.faults:
        return Difference(
            operator=operator, name="faults", expected=str(list(expected.faults)), found=str(list(faults))
        )
    return None
