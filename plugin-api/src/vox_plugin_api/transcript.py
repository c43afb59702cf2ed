"""Write what was asked and answered so that two runs can be compared with `cmp`.

One canonical JSON line per message. Only what must be equal is written: no request ids, no
observations, no process or host facts, and of a request nothing that is a matter of this machine
(`LOCAL_PARAMS`). The lines of one request stand together and requests stand in the order in
which they were begun, however their answers were interleaved in time.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from vox_plugin_api import messages as m

__all__ = ["LOCAL_PARAMS", "Exchange", "Transcript"]

log = logging.getLogger(__name__)

LOCAL_PARAMS = frozenset(
    {
        "devices",
        "model_dir",
        "threads",
        "memory_bytes",
        "lane_options",
        "resume_dir",
        "file",
        "folder",
        "micro_batch_size",
        "remember_bytes",
    }
)
"""Parameters that say where and with what, never what: `model_digest` names the model, `digest` a file."""


class Exchange:
    """One request and its answer, as lines."""

    def __init__(self, transcript: Transcript, number: int, method: str, params: m.Message) -> None:
        self._transcript = transcript
        self._number = number
        self.lines: list[bytes] = []
        self.is_complete = False
        self._add({"method": method, "params": _without_local(params.model_dump(mode="json"))})

    def event(self, result: dict[str, Any] | None, slices: Sequence[bytes] = ()) -> None:
        """Add one event; one that only observes leaves no line."""
        if result is not None:
            self._add({"result": result})
        for piece in slices:
            self._add({"slice": hashlib.sha256(piece).hexdigest(), "bytes": len(piece)})

    def end(self, failure: str | None = None) -> None:
        """State that nothing more will come, and the code of the error if one ended the request.

        The error's text is left out: it may hold facts of this machine.
        """
        if failure is not None:
            self._add({"failed": failure})
        self.is_complete = True
        self._transcript._write_complete()

    def _add(self, content: dict[str, Any]) -> None:
        self.lines.append(m.canonical_json({"request": self._number, **content}) + b"\n")


class Transcript:
    """The file `path`; it appears under its name, whole, when the transcript is closed.

    A disk that fills is no reason to stop answering: from then on nothing is recorded, nothing
    stays behind, and `close` says why there is no transcript.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        self._file: BinaryIO = self._partial.open("wb")
        self._failure: OSError | None = None
        self._write([m.canonical_json({"transcript": 1, "protocol": m.PROTOCOL_MAX}) + b"\n"])
        self._open: deque[Exchange] = deque()
        self._begun = 0

    def begin(self, method: str, params: m.Message) -> Exchange:
        """Start recording a request."""
        self._begun += 1
        exchange = Exchange(self, self._begun, method, params)
        self._open.append(exchange)
        return exchange

    def close(self) -> None:
        """Write what is left, to disk, and give the file its name. Closing twice does nothing.

        Raises:
            OSError: it could not be written; the file at `path`, if any, is as it was.
        """
        if not self._file.closed:
            for exchange in self._open:
                exchange.is_complete = True
            self._write_complete()
            try:
                self._file.flush()
                os.fsync(self._file.fileno())
                self._file.close()
                self._partial.replace(self._path)
            except OSError as error:
                self._give_up(error)
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def __enter__(self) -> Transcript:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _write_complete(self) -> None:
        while self._open and self._open[0].is_complete:
            self._write(self._open.popleft().lines)

    def _write(self, lines: Sequence[bytes]) -> None:
        if self._file.closed:
            return
        try:
            self._file.writelines(lines)
            # A full disk shows now, and not in the answers of an hour.
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        log.warning("the transcript %s can't be written and was given up: %s", self._path, error.strerror)
        self._failure = OSError(error.errno, error.strerror, str(self._path))
        with contextlib.suppress(OSError):
            self._file.close()
        self._partial.unlink(missing_ok=True)


def _without_local(params: dict[str, Any]) -> dict[str, Any]:
    """Leave out what is local, also of a parameter that has parts (an adapter's file)."""
    return {
        name: _without_local(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if name not in LOCAL_PARAMS
    }
