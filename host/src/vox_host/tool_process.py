"""Run a tool in a process group of its own, which ends with the block, however that is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence

__all__ = ["tool_process"]

_GRACE_S = 3.0


@contextlib.contextmanager
def tool_process(
    command: Sequence[str], environment: Mapping[str, str], *, stderr: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start `command` with its stdout in a pipe; what is left of it at the end is stopped and waited for.

    Raises:
        OSError: it can't be started.
    """
    process = subprocess.Popen(
        list(command),
        env=dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        # Its own group: it can be ended with all that it has started.
        start_new_session=True,
    )
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
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def _signal(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
