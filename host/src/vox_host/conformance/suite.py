"""Run the groups on one plugin, one after the other, and add up what came of them."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from pathlib import Path

from vox_host.conformance.expected import load_models, suite_digest
from vox_host.conformance.grading import TOLERANCE
from vox_host.conformance.groups import GROUPS, Group
from vox_host.conformance.session import START_S, NotOfferedError, Session, Target
from vox_host.conformance.tiny_models import TINY_MODELS
from vox_host.conformance.verdict import CaseResult, GroupResult, Report
from vox_host.counted import counted
from vox_host.environment_use import alone_with, hold_environment, lock_path
from vox_host.errors import IntegrityError, PluginError, UsageError, VoxError
from vox_host.execution import execution_of
from vox_host.integrity import verify_installation
from vox_host.receipt import load_receipt
from vox_host.workers import Worker

__all__ = ["check", "known_groups"]

_START_FAILURES = ("handshake-timeout", "worker-died", "plugin-load-failed", "connection-closed")
"""A start that went wrong in the plugin's own code: a report says so."""
_PROGRESS_S = 15.0
_PREFIX = "vox-check-"


def known_groups() -> tuple[str, ...]:
    """Return the names of all groups, in the order in which they run."""
    return tuple(GROUPS)


async def check(
    target: Target, *, only: Sequence[str] = (), say: Callable[[str], None] = lambda _: None
) -> Report:
    """Run the groups named in `only`, or all of them.

    Raises:
        UsageError: there is no such group, or the plugin lacks the numerics that were asked for.
        IntegrityError: the plugin's bytes are not those of its receipt; nothing was started.
        PluginError: another installation replaced the plugin meanwhile; no verdict came of it.
        VoxError: the plugin can't be started at all.
    """
    unknown = [name for name in only if name not in GROUPS]
    if unknown:
        raise UsageError(
            "usage",
            f"--only knows no group {', '.join(unknown)}; nothing was started",
            facts=[("groups", ", ".join(GROUPS))],
        )
    candidate = target.candidate
    _refuse_missing_numerics(target)
    if candidate.receipt is not None:
        hold_environment(target.settings.plugins_dir, candidate.receipt.environment)
        # Every byte before, and again as the last group: what is graded is what was installed.
        await asyncio.to_thread(
            verify_installation, candidate.receipt, target.settings.plugins_dir, full=True
        )
    started = time.monotonic()
    groups: list[GroupResult] = []
    with _folder() as folder:
        session = Session(target, folder, say)
        await _try_start(session)
        if session.start_failure is not None:
            groups.append(_start_result(session, session.start_failure))
        for name, group in GROUPS.items():
            _refuse_replaced(target)
            if not only or name in only:
                groups.append(await _run_group(session, name, group, was_asked_for=name in only))
        _refuse_replaced(target)
        lane_facts = session.lane_facts
    return Report(
        plugin=candidate.plugin_id,
        plugin_version=candidate.version or "",
        lane=candidate.lane or "",
        execution=execution_of(candidate.execution, {"lane": lane_facts}),
        plugin_tree_digest=candidate.receipt.tree_digest if candidate.receipt else None,
        numerics=(session.numerics,),
        numerics_version=int(load_models()[0]["numerics_version"]),
        suite_digest=suite_digest(),
        groups=tuple(groups),
        # A plugin's verdict is about what it is asked for by default.
        is_complete=not only and not target.lane_options and target.numerics is None,
        tolerance="" if session.is_canonical else TOLERANCE,
        observation={"seconds": round(time.monotonic() - started, 1), "lane": lane_facts},
    )


def _refuse_missing_numerics(target: Target) -> None:
    manifest = target.candidate.manifest
    offered = manifest.backend.numerics if manifest else ()
    if target.numerics is not None and target.numerics not in offered:
        raise UsageError(
            "numerics-missing",
            f'plugin "{target.candidate.plugin_id}" has no {target.numerics} numerics; nothing was started',
            facts=[("expected", target.numerics), ("found", ", ".join(offered) or "none")],
            remedy="Leave --numerics out, or check a plugin that has them (`vox-host plugin list`).",
        )


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Give a folder for the tiny models, gone afterwards, and remove those that killed checks have left."""
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{_PREFIX}*"):
        # Another user's can't be opened; one without a lock is just being made, or of an older vox-host.
        with contextlib.suppress(OSError):
            if lock_path(root, left.name).exists():
                with alone_with(root, left.name) as is_free:
                    if is_free:
                        shutil.rmtree(left, ignore_errors=True)
                        lock_path(root, left.name).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as folder:
        path = Path(folder)
        hold_environment(root, path.name)
        try:
            yield path
        finally:
            lock_path(root, path.name).unlink(missing_ok=True)


def _refuse_replaced(target: Target) -> None:
    """Give up where what is installed now is no longer what is checked: its verdict would be of no use."""
    receipt = target.candidate.receipt
    if receipt is None:
        return
    try:
        installed = load_receipt(target.settings.plugins_dir / f"{receipt.plugin}.json").environment
    except (OSError, VoxError):
        installed = "none that can be read"
    if installed != receipt.environment:
        raise PluginError(
            "plugin-replaced",
            f'plugin "{receipt.plugin}" was replaced or removed while it was checked; '
            "the check was given up, and no verdict was stored",
            facts=[("checked", receipt.environment), ("installed now", installed)],
            remedy=f"vox-host plugin check {receipt.plugin}",
        )


async def _refuse_unknown_options(session: Session, worker: Worker) -> None:
    """Raise a mistake in a lane option as the user's, before each case takes it for the plugin's."""
    if not session.target.lane_options:
        return
    try:
        await session.load(worker, TINY_MODELS[0].name)
    except UsageError as error:
        if error.code == "lane-option":
            raise
    except (VoxError, TimeoutError):
        pass  # the groups tell


async def _try_start(session: Session) -> None:
    """Learn whether the lane serves; one that fails its self-test is still shown where it differs."""
    session.say(f"start: waiting for the worker, its entry point and self-test, at most {START_S:.0f} s")
    try:
        async with session.worker() as worker:
            await _refuse_unknown_options(session, worker)
    except VoxError as error:
        if error.code == "self-test-failed":
            session.self_test_failure = error
            session.say(f"  FAILED self-test: {error.message}{_failed_cases(error)}")
        elif error.code in _START_FAILURES:
            session.start_failure = error
        else:
            raise


def _start_result(session: Session, error: VoxError) -> GroupResult:
    """Return the report's group of a start that came to nothing."""
    log = dict(error.facts).get("log")
    parts = [f"{error.code}: {error.message}", error.remedy or "", f"log: {log}" if log else ""]
    detail = "; ".join(part.rstrip(".") for part in parts if part)
    session.say(f"  FAILED start: {detail}")
    case = CaseResult(name="start", grade="failed", detail=detail)
    return GroupResult(name="start", cases=(case,))


def _failed_cases(error: VoxError) -> str:
    names = dict(error.facts).get("failed")
    return f": {', '.join(map(str, names))}" if isinstance(names, list | tuple) and names else ""


@contextlib.asynccontextmanager
async def _progress(session: Session, name: str, cases: Sequence[CaseResult]) -> AsyncGenerator[None, None]:
    """Say now and then how far a group has come, so that waiting is not mistaken for a hang."""

    async def tell() -> None:
        started = time.monotonic()
        while True:
            await asyncio.sleep(_PROGRESS_S)
            took_s = time.monotonic() - started
            session.say(f"  {name}: {counted(len(cases), 'case')} so far, after {took_s:.0f} s")

    task = asyncio.create_task(tell())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _run_group(session: Session, name: str, group: Group, *, was_asked_for: bool) -> GroupResult:
    session.say(f"{name}: {group.title}")
    cases: list[CaseResult] = []
    skipped: str | None = None
    if session.start_failure is not None and name != "integrity":
        why = f"no worker starts: {session.start_failure.code}"
        return GroupResult(name=name, skipped=why, was_asked_for=was_asked_for)
    failure = session.self_test_failure
    if failure is not None and group.needs_service:
        why = f"the worker serves nothing: {failure.message}"
        return GroupResult(name=name, skipped=why, was_asked_for=was_asked_for)
    try:
        async with contextlib.aclosing(group.run(session)) as results, _progress(session, name, cases):
            async for result in results:
                cases.append(result)
                if result.is_failed:
                    session.say(f"  FAILED {result.name}: {result.detail}")
                elif result.is_not_comparable and not any(case.is_not_comparable for case in cases[:-1]):
                    session.say(f"  not comparable: {result.name}: {result.detail}")
                if result.is_hang:
                    detail = "the plugin hung; this group's cases after it were not run"
                    cases.append(CaseResult(name="worker", grade="failed", detail=detail))
                    session.say(f"  given up: {detail}")
                    break
    except NotOfferedError as reason:
        skipped = str(reason)
        session.say(f"  skipped: {reason}")
    except IntegrityError:
        raise
    except (VoxError, TimeoutError) as error:
        detail = f"{error.code}: {error.message}" if isinstance(error, VoxError) else "no answer in time"
        cases.append(CaseResult(name="worker", grade="failed", detail=detail))
    if failure is not None and not group.needs_service and name == "operators":
        cases.append(
            CaseResult(name="self-test", grade="failed", detail=failure.message + _failed_cases(failure))
        )
    return GroupResult(name=name, cases=tuple(cases), skipped=skipped, was_asked_for=was_asked_for)
