"""One operating-system process of a worker: start it, learn of its end, end it.

The process leads a session and a group of its own, gets one descriptor beyond the standard
ones, and writes stdout and stderr to a log (`log_file`): a worker never waits for its host to
read a line, and what it said last is there after any death. A watchdog process outlives the host by the
moment it needs to kill the group, so that a worker inside a native call, and whatever it has
started, ends with the host on every platform.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from dataclasses import dataclass

from vox_host.watchdog import Watchdog
from vox_host.workers.launch import LaunchPlan, Limits, worker_environment
from vox_host.workers.log_file import HOST_STDERR, WorkerLog, open_log

__all__ = ["Exit", "WorkerProcess"]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended."""

    status: int | None
    """What it returned; None when a signal ended it."""
    signal_number: int | None
    after_s: float

    def __str__(self) -> str:
        if self.signal_number is None:
            return f"status {self.status} after {self.after_s:.1f} s"
        try:
            name = signal.Signals(self.signal_number).name
        except ValueError:
            name = "unnamed"
        return f"signal {self.signal_number} ({name}) after {self.after_s:.1f} s"


class WorkerProcess:
    """A started process. `exited` is done, with an `Exit`, as soon as it has ended."""

    def __init__(
        self,
        popen: subprocess.Popen[bytes],
        watchdog: Watchdog | None,
        connection: socket.socket,
        log: WorkerLog,
    ) -> None:
        self.pid = popen.pid
        self.connection = connection
        self.log = log
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        self._popen = popen
        self._watchdog = watchdog
        self._started = time.monotonic()
        self._signals = threading.Lock()
        self._is_gone = False
        threading.Thread(target=self._wait, args=(self.exited.get_loop(),), daemon=True).start()

    @classmethod
    def start(cls, plan: LaunchPlan) -> WorkerProcess:
        """Start the worker of `plan`. It must be called on the thread of the event loop, since
        the kernel ties the worker's life to the thread that started it.

        Raises:
            OSError: the interpreter cannot be started; nothing was.
        """
        ours, theirs = socket.socketpair()
        watchdog = None
        try:
            log, file = open_log(plan.log_dir, plan.plugin_id)
            with file or contextlib.nullcontext(), theirs:
                watchdog = Watchdog.start()
                popen = subprocess.Popen(
                    [plan.python, "-I", "-B", "-m", "vox_plugin_api.child", plan.plugin_id],
                    stdin=subprocess.DEVNULL,
                    stdout=file or HOST_STDERR,
                    stderr=file or HOST_STDERR,
                    cwd=plan.log_dir if file else "/",
                    # The one place where the host's environment is handed on, filtered.
                    env=worker_environment(os.environ, plan.extra_environment, theirs.fileno()),
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            if watchdog is not None:
                watchdog.stop()
            raise
        if watchdog is not None:
            watchdog.watch(popen.pid)
        return cls(popen, watchdog, ours, log)

    def kill(self) -> None:
        """End the process and all it has started, now."""
        self._signal(signal.SIGKILL)

    async def end(self, limits: Limits) -> None:
        """Wait for the process to leave by itself, then insist, then kill."""
        for wait_s, next_signal in (
            (limits.shutdown_grace_s, signal.SIGTERM),
            (limits.terminate_grace_s, signal.SIGKILL),
        ):
            done, _ = await asyncio.wait([self.exited], timeout=wait_s)
            if done:
                return
            self._signal(next_signal)

    def _signal(self, number: signal.Signals) -> None:
        # Not once it was waited for: its number may then be another group's.
        with self._signals:
            if not self._is_gone:
                _kill_group(self.pid, number)

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        if hasattr(os, "waitid"):
            # As long as the dead leader was not waited for, its group's number is still its own.
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
            with self._signals:
                _kill_group(self.pid, signal.SIGKILL)
                self._is_gone = True
            code = self._popen.wait()
        else:
            code = self._popen.wait()
            with self._signals:
                _kill_group(self.pid, signal.SIGKILL)
                self._is_gone = True
        if self._watchdog is not None:
            self._watchdog.stop()
        exit_ = Exit(
            status=code if code >= 0 else None,
            signal_number=-code if code < 0 else None,
            after_s=time.monotonic() - self._started,
        )
        with contextlib.suppress(RuntimeError):  # the loop has closed; nobody waits any more
            loop.call_soon_threadsafe(self._set_exit, exit_)

    def _set_exit(self, exit_: Exit) -> None:
        if not self.exited.done():
            self.exited.set_result(exit_)


def _kill_group(group: int, number: signal.Signals) -> None:
    # macOS says EPERM for a group in which only dead processes are left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
