"""Rank 0's end of the line to another rank: frames without blocking, and whether it still lives."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections import deque

from mens_core.peers.messages import Broke, FromPeer, decode_from_peer
from vox_plugin_api.backend import BackendError
from vox_plugin_api.framing import FrameDecoder, ProtocolError, encode_message
from vox_plugin_api.messages import Message

__all__ = ["Link"]

_EXIT_S = 2.0
"""From the end of the line to the end of the process, which says more."""
_SEND_S = 60.0


class Link:
    """One other rank."""

    def __init__(
        self, rank: int, line: socket.socket, pid: int, process: subprocess.Popen[bytes] | None
    ) -> None:
        """Take over a line whose `Joined` was read; `process`: None where another launcher started it."""
        self.rank = rank
        self.pid = pid
        self.heard_s = time.monotonic()
        self._line = line
        self._line.settimeout(_SEND_S)
        self._process = process
        self._decoder = FrameDecoder()
        self._inbox: deque[FromPeer] = deque()
        self._is_closed = False

    def send(self, message: Message) -> None:
        """Say it, unless the rank has ended with a message that is still to be taken.

        Raises:
            BackendError: `peer-lost`.
        """
        try:
            self._line.sendall(encode_message(message))
        except OSError as problem:
            self.look()
            if not self._has_last_words():
                raise self.lost(f"the line to it is closed ({problem})") from None

    def look(self) -> None:
        """Read what has come, without waiting.

        Raises:
            BackendError: `peer-lost`: it said something that is no message, or ended without saying why.
        """
        if self._is_closed:
            self._refuse_silent_end()
        while not self._is_closed and select.select([self._line], [], [], 0)[0]:
            try:
                data = self._line.recv(1 << 18)
            except OSError:
                data = b""
            if not data:
                self._is_closed = True
                self._refuse_silent_end()
                return
            self.heard_s = time.monotonic()
            try:
                self._inbox += [decode_from_peer(frame) for frame in self._decoder.feed(data)]
            except ProtocolError as breach:
                raise self.lost(f"it broke the protocol: {breach.message}") from None

    def _refuse_silent_end(self) -> None:
        if not self._has_last_words():
            raise self.lost("it closed its line")

    def _has_last_words(self) -> bool:
        return any(isinstance(message, Broke) and message.number is None for message in self._inbox)

    def take(self) -> FromPeer | None:
        """Return the next message that was read."""
        return self._inbox.popleft() if self._inbox else None

    def fileno(self) -> int:
        """Of the line, for `select`."""
        return self._line.fileno()

    def lost(self, why: str) -> BackendError:
        """Return the error, with how the process ended where that is known."""
        ended = self._wait(_EXIT_S)
        facts: dict[str, object] = {"rank": self.rank, "pid": self.pid, "why": why}
        if ended is not None:
            facts |= {"signal": -ended} if ended < 0 else {"status": ended}
            how = f"signal {-ended}" if ended < 0 else f"status {ended}"
            why = f"it ended with {how}"
        return BackendError(
            "peer-lost",
            f"rank {self.rank} of the training (process {self.pid}) is gone: {why}",
            facts=facts,
            remedy="The worker's log has its last lines. The training can be saved as it is; it goes on "
            "from a save, on as many devices as are left.",
        )

    def end(self, within_s: float) -> None:
        """Wait for the rank to end by itself, then see that it does."""
        self._wait(within_s)
        self._line.close()
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _wait(self, within_s: float) -> int | None:
        if self._process is None:
            return None
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(within_s)
        return None
