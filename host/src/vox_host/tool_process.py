"""Run a tool in a process group of its own, which ends with the block, however that is left.

It ends with this process too, SIGKILL included: a watchdog kills the group. The tool begins only
once the watchdog knows the group, so a kill at any moment leaves no tool running that would go on
writing where the next command cleans up.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from vox_host import watchdog
from vox_host.watchdog import Watchdog

__all__ = ["tool_process"]

_GRACE_S = 3.0
# Waits for a line; when the other end closes instead, this process has died, and the tool never begins.
_GATE = 'read -r _ || exit 125; exec "$@" </dev/null'


@contextlib.contextmanager
def tool_process(
    command: Sequence[str], environment: Mapping[str, str], *, stderr: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` with its stdout in a pipe; what is left of it at the end is stopped and waited for.

    Raises:
        OSError: it can't be started.
    """
    _check_startable(command[0], environment)
    guard = Watchdog.start()
    try:
        process = _start(command, environment, stderr, guard)
    except BaseException:
        if guard is not None:
            guard.stop()
        raise
    try:
        yield process
    finally:
        if process.poll() is None:
            # As Ctrl-C does: installers then remove their scratch folders.
            _signal(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            _signal(process.pid, signal.SIGKILL)
            process.wait()
        if guard is not None:
            guard.stop()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _check_startable(program: str, environment: Mapping[str, str]) -> None:
    """Refuse what the shell at the gate would only report as a status."""
    if shutil.which(program, path=environment.get("PATH", os.defpath)) is None:
        number = errno.EACCES if os.path.exists(program) else errno.ENOENT  # noqa: PTH110 (a name or a path)
        raise OSError(number, os.strerror(number), program)


def _start(
    command: Sequence[str], environment: Mapping[str, str], stderr: int, guard: Watchdog | None
) -> subprocess.Popen[bytes]:
    if guard is None:
        return _popen(command, environment, stderr, subprocess.DEVNULL)
    read_end, write_end = os.pipe()
    try:
        try:
            gated = [str(watchdog.SHELL), "-c", _GATE, "sh", *command]
            process = _popen(gated, environment, stderr, read_end)
        finally:
            os.close(read_end)
        guard.watch(process.pid)
        with contextlib.suppress(BrokenPipeError):
            os.write(write_end, b"go\n")
    finally:
        os.close(write_end)
    return process


def _popen(
    command: Sequence[str], environment: Mapping[str, str], stderr: int, stdin: int
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        # Its own group: it can be ended with all that it has started.
        start_new_session=True,
    )


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
