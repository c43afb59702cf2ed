"""Every operator of the lane, on operands chosen to show the classic mistakes, byte for byte."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace

from vox_host.conformance.compare import Difference, first_difference
from vox_host.conformance.expected import ExpectedCase, ExpectedGroup, load_group
from vox_host.conformance.session import NotOfferedError, Session, case, failed, in_time
from vox_host.conformance.verdict import CaseResult
from vox_host.errors import VoxError
from vox_host.workers import Event, Worker
from vox_plugin_api.conformance_messages import ConformanceParams, ConformanceResult

__all__ = ["compare_case", "run", "run_group"]

_UNKNOWN = ("not-supported", "invalid-request", "unknown-group")


async def run(session: Session) -> AsyncGenerator[CaseResult, None]:
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
    suite = load_group(group)
    has_answered = False
    async with session.worker("check") as worker:
        for expected in suite.cases:
            try:
                event = await _ask(session, worker, group, expected.name)
            except VoxError as error:
                if error.code in _UNKNOWN and not has_answered:
                    raise NotOfferedError(
                        f"the plugin shows none of these operators ({error.code})"
                    ) from None
                if error.code == "unknown-case":
                    yield _not_comparable(expected.name, suite, None, _stated_version(error))
                    continue
                yield CaseResult(name=expected.name, grade="failed", detail=f"{error.code}: {error.message}")
                if worker.ended.done():
                    yield CaseResult(
                        name="worker", grade="failed", detail="the worker ended; cases after it were not run"
                    )
                    return
                continue
            except TimeoutError:
                yield CaseResult(name=expected.name, grade="failed", detail="no answer in time", is_hang=True)
                return
            has_answered = True
            yield await case(expected.name, _judge(group, suite, expected, event), "bitwise")


async def _ask(session: Session, worker: Worker, group: str, name: str) -> Event:
    target = session.target
    params = ConformanceParams(
        group=group, case=name, threads=target.threads, lane_options=dict(target.lane_options)
    )
    event: Event = await in_time(worker.call("conformance", params))
    return event


async def _judge(group: str, suite: ExpectedGroup, expected: ExpectedCase, event: Event) -> CaseResult | None:
    result = ConformanceResult.model_validate(event.result)
    if result.numerics_version != suite.numerics_version:
        return failed(
            f"it computes numerics {result.numerics_version}, "
            f"this suite is of numerics {suite.numerics_version}"
        )
    # Before any output: those of two cases can't be compared, however alike their names are.
    if result.definition != expected.definition:
        found = f"definition {result.definition[:16]}" if result.definition else "no definition"
        found += f" where {expected.definition[:16]} is expected"
        return _not_comparable(expected.name, suite, found, result.suite_version)
    difference = compare_case(expected, result, event.payloads)
    if difference is None:
        return None
    placed = Difference(**{**difference.as_dict(), "group": group, "case": expected.name})
    return failed(str(placed), placed)


def _not_comparable(name: str, suite: ExpectedGroup, found: str | None, version: int | None) -> CaseResult:
    """Say in one sentence that the plugin has another case, or none, and what would help.

    Args:
        found: of the plugin's definition; None: it has no case of this name.
        version: of the plugin's suite, where it states one.
    """
    what = "the plugin has no such case" if found is None else f"not the recorded case ({found})"
    stated = "states no version of its suite" if version is None else f"has suite {version}"
    ours = suite.suite_version
    if version is not None and version > ours:
        remedy = "update vox-host"
    else:
        remedy = f"reinstall the plugin, built with the mens-core of suite {ours}"
    detail = f"{what}; the plugin {stated}, this vox-host suite {ours}: {remedy}"
    return CaseResult(name=name, grade="not comparable", detail=detail)


def _stated_version(error: VoxError) -> int | None:
    value = dict(error.facts).get("suite_version")
    return int(value) if value is not None and str(value).isdecimal() else None


def _of_nan(difference: Difference) -> Difference:
    """Say in words what the numbers of a case of faults stand for: whether an element is NaN."""
    said = {"00000001": "NaN, in a row that is not finite", "00000000": "a number"}
    return replace(
        difference,
        expected=said.get(difference.expected, difference.expected),
        found=said.get(difference.found, difference.found),
    )


def _of_faults(faults: tuple[tuple[str, tuple[int, ...]], ...]) -> str:
    """Say which calls reported which rows as not finite."""
    return "; ".join(f'"{name}" reports rows {list(rows)}' for name, rows in faults) or "no fault reported"


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
            is_about_nan = expected.name.endswith("/faults") and wanted.dtype == "i32"
            return _of_nan(difference) if is_about_nan else difference
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
            operator=operator, name="faults", expected=_of_faults(expected.faults), found=_of_faults(faults)
        )
    return None
