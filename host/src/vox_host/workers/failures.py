"""Turn what happened to a worker into an error with facts and a remedy."""

from __future__ import annotations

import signal

import psutil

from vox_host.errors import IntegrityError, ModelError, PluginError, UsageError, VoxError, WorkerFailedError
from vox_host.workers.launch import LaunchPlan
from vox_host.workers.process import Exit, WorkerProcess
from vox_plugin_api import messages as m

__all__ = [
    "blames_what_was_named",
    "ended_too_often",
    "from_worker_error",
    "not_ended",
    "not_restarted",
    "not_started",
    "refused",
    "start_remedy",
    "worker_died",
    "worker_killed",
]

_GIB = 2**30
_SHOWN_LINES = 20
_BLAME_THE_REQUEST = frozenset(
    {
        "context-too-long",
        "threads-refused",
        "insufficient-memory",
        "lane-option",
        "invalid-example",
        "adapter-target",
        "adapter-scale",
        "adapter-tensors",
        "adapter-unreadable",
        "resume-invalid",
        "resume-mismatch",
        "folder-exists",
        "save-failed",
    }
)
_WAS_KILLED = (
    "Something sent it SIGKILL: where memory is short, that was the system "
    "(`vox-host doctor` shows what is free)."
)
_BLAME_THE_MODEL = (
    "config-",
    "weights-",
    "tensor-",
    "vector-",
    "checkpoint-",
    "safetensors-",
    "index-",
    "shard",
)


_ANOTHER_MAY_READ = frozenset({"config-unsupported", "weights-format"})
"""What one plugin has no code for, another one may run."""


def blames_what_was_named(failure: VoxError) -> bool:
    """Whether the model or the adapter is at fault, so that no other plugin is to be tried with it.

    One that does not look would answer with what another one refused.
    """
    if isinstance(failure, ModelError):
        return failure.code not in _ANOTHER_MAY_READ
    return isinstance(failure, UsageError) and failure.code.startswith("adapter-")


def start_remedy(plan: LaunchPlan, stage: str | None) -> str | None:
    """Return what an author does about a start that ended or hung in `stage`; None: it never got so far."""
    if stage is None:
        return None
    where = "self-test" if "self-test" in stage else "entry point"
    return (
        f"Nothing in the {where} of {plan.plugin_id} may exit, hang or take as long as that; "
        "the worker's log has what it said last."
    )


def worker_died(
    plan: LaunchPlan, process: WorkerProcess, exit_: Exit, doing: str, stage: str | None = None
) -> WorkerFailedError:
    """Return the error for a process that ended by itself while `doing` was going on.

    Args:
        stage: of its start, where that was what it was doing.
    """
    # The log's path is a fact, for the terminal; message and remedy also reach clients over HTTP.
    was_killed = exit_.signal_number == signal.SIGKILL
    remedy = _WAS_KILLED if was_killed else None
    remedy = remedy or start_remedy(plan, stage)
    return WorkerFailedError(
        "worker-died",
        f'worker "{plan.plugin_id}" exited {doing} ({exit_}); what it was doing was not repeated',
        facts=[("exit", str(exit_)), *_evidence(plan, process)],
        remedy=remedy,
    )


def worker_killed(
    plan: LaunchPlan,
    process: WorkerProcess,
    code: str,
    why: str,
    facts: list[tuple[str, object]],
    remedy: str | None = None,
) -> WorkerFailedError:
    """Return the error for a process that this host ended, and why it did."""
    return WorkerFailedError(
        code,
        f'worker "{plan.plugin_id}" {why}; it was killed and what it was doing was not repeated',
        facts=[*facts, *_evidence(plan, process)],
        remedy=remedy,
    )


def not_started(plan: LaunchPlan, error: OSError) -> WorkerFailedError:
    """Return the error for a process that could not even be started."""
    return WorkerFailedError(
        "worker-not-started",
        f'worker "{plan.plugin_id}" could not be started: {error.strerror or error}',
        facts=[("interpreter", str(plan.python))],
        remedy=f"Run `vox-host plugin verify {plan.plugin_id}`, then install the plugin again.",
    )


def not_ended(plan: LaunchPlan, process: WorkerProcess) -> WorkerFailedError:
    """Return the error for a process that even SIGKILL did not end."""
    return WorkerFailedError(
        "worker-not-ended",
        f'worker "{plan.plugin_id}" was sent SIGKILL and is still there',
        facts=[("pid", process.pid), ("log", str(process.log))],
        remedy="It probably waits inside the kernel, for a disk or a device driver (not confirmed); "
        f"`ps -o stat,wchan -p {process.pid}` shows where.",
    )


def ended_too_often(plan: LaunchPlan, times: int, within_s: float, last: VoxError) -> WorkerFailedError:
    """Return why no other worker is started after `times` of them ended, or failed to start, in a row."""
    how = dict(last.facts).get("exit", last.message)
    return WorkerFailedError(
        "worker-failed",
        f'worker "{plan.plugin_id}" ended {times} times within {within_s:.0f} s and is not started again; '
        f"the last: {how}",
        facts=_of_last(last),
        remedy="Restart `vox-host serve`; the server's log says how each of them ended.",
    )


def not_restarted(plan: LaunchPlan, why: VoxError | None) -> WorkerFailedError:
    """Return that another worker can't be started because of `why`; None: a mistake of this host."""
    reason = "the host failed unexpectedly, its log has the details" if why is None else why.message
    first = "" if why is None or why.remedy is None else f"{why.remedy.rstrip('.')}. "
    return WorkerFailedError(
        "worker-failed",
        f'worker "{plan.plugin_id}" ended and can\'t be started again: {reason}',
        facts=[] if why is None else _of_last(why),
        remedy=f"{first}Then restart `vox-host serve`." if first else "Restart `vox-host serve`.",
    )


def _of_last(last: VoxError) -> list[tuple[str, object]]:
    return [("last error", f"{last.code}: {last.message}"), *last.facts]


def refused(plan: LaunchPlan, process: WorkerProcess, error: m.WorkerError) -> VoxError:
    """Return the error for a worker that answered the handshake with a refusal."""
    kind: type[VoxError] = {
        "manifest-mismatch": IntegrityError,
        "protocol-mismatch": PluginError,
        "invalid-manifest": PluginError,
        "manifest-disagrees": PluginError,
        "plugin-not-found": PluginError,
        "wrong-plugin": PluginError,
    }.get(error.code, WorkerFailedError)
    return kind(
        error.code,
        error.message,
        facts=[*error.facts.items(), ("log", str(process.log))],
        remedy=error.remedy or f"Run `vox-host plugin verify {plan.plugin_id}`, or install the plugin again.",
    )


def from_worker_error(error: m.WorkerError) -> VoxError:
    """Return an error that crossed the wire as data.

    What blames the request or the model's files is the user's to mend; the rest is the worker's.
    """
    kind: type[VoxError] = WorkerFailedError
    if error.code == "adapter-digest":
        kind = IntegrityError
    elif error.code in _BLAME_THE_REQUEST:
        kind = UsageError
    elif error.code.startswith(_BLAME_THE_MODEL):
        kind = ModelError
    remedy = error.remedy
    if remedy is None and error.code == "invalid-request" and {"method", "protocol"} <= error.facts.keys():
        remedy = (
            "The plugin is of another version than this vox-host: `vox-host plugin list` shows it. Install "
            "the one that belongs to this vox-host with `vox-host plugin install`."
        )
    return kind(error.code, error.message, facts=list(error.facts.items()), remedy=remedy)


def _evidence(plan: LaunchPlan, process: WorkerProcess) -> list[tuple[str, object]]:
    memory = psutil.virtual_memory()
    lines = process.log.tail().rstrip().splitlines()[-_SHOWN_LINES:]
    return [
        ("command", f"{plan.python} -I -B -m vox_plugin_api.child {plan.plugin_id}"),
        ("pid", process.pid),
        ("last lines", lines),
        ("memory", f"{memory.available / _GIB:.1f} GiB free of {memory.total / _GIB:.1f} GiB when it exited"),
        ("log", str(process.log)),
    ]
