"""The worker's request loop: one backend thread takes turns between the requests in flight.

Three threads: a reader turns frames into messages, the backend thread (the caller of `run`)
owns the model and does all the work, a third says once a second that the process lives and how
much it has finished. Before each round of turns the backend thread looks at what has come in, so
a cancelled request takes no more than one further step. The tokens of a round leave together: a write
wakes the host, and one for each token would take longer than all else that is done for it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from vox_plugin_api import messages as m
from vox_plugin_api.backend import Backend, BackendError, Reply, Stream
from vox_plugin_api.conformance_messages import ConformanceParams
from vox_plugin_api.framing import (
    AnyToWorker,
    Frame,
    FrameChannel,
    ProtocolError,
    decode_to_worker,
    encode_frame,
    encode_message,
    encode_token,
)
from vox_plugin_api.resident import resident_bytes

__all__ = [
    "EXIT_HOST_GONE",
    "EXIT_PROTOCOL_BREACH",
    "HEARTBEAT_INTERVAL_S",
    "RequestLoop",
    "internal_error",
]

HEARTBEAT_INTERVAL_S = 1.0
EXIT_HOST_GONE = 10
EXIT_PROTOCOL_BREACH = 11

_CHECKS = frozenset({"self_test", "conformance"})
"""What a lane may be asked that failed its self-test."""


@dataclass(slots=True)
class _Running:
    """A request whose generator has more to give."""

    method: m.Method
    stream: Stream
    results_wanted: int
    """How many results complete the answer; a generation is complete by its finish reason."""
    results: int = 0

    def is_final(self, result: m.Message) -> bool:
        self.results += 1
        if isinstance(result, m.GenerateResult):
            return result.finish_reason is not None
        return self.results >= self.results_wanted


class RequestLoop:
    """Serves one host until it says shutdown or goes away."""

    def __init__(self, channel: FrameChannel, backend: Backend, refusal: m.WorkerError | None = None) -> None:
        """Nothing is read yet. With a `refusal` (the self-test's) only checks are answered."""
        self._channel = channel
        self._backend = backend
        self._refusal = refusal
        self._inbox: queue.SimpleQueue[AnyToWorker] = queue.SimpleQueue()
        self._running: dict[int, _Running] = {}
        self._held: list[bytes] = []
        """Frames of this round that go out with those to come."""
        self._progress = 0
        self._busy = False
        self._stopping = False

    def run(self) -> int:
        """Serve requests; return the process's exit status."""
        threading.Thread(target=self._read, name="vox-reader", daemon=True).start()
        threading.Thread(target=self._beat, name="vox-heartbeat", daemon=True).start()
        while not self._stopping:
            self._take_messages(wait=not self._running)
            for request_id in list(self._running):
                self._step(request_id)
            self._write_held()
        for request_id in list(self._running):
            self._cancel(request_id)
        return 0

    # --- messages --------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            while (frame := self._channel.read()) is not None:
                try:
                    self._inbox.put(decode_to_worker(frame))
                except ProtocolError as error:
                    self._answer_unknown(frame, error)
        except ProtocolError as error:
            self._leave(error)
        # Nobody is left to work for. The backend thread may be in a call that never returns,
        # so the process ends here and now instead of asking it.
        os._exit(EXIT_HOST_GONE)

    def _answer_unknown(self, frame: Frame, error: ProtocolError) -> None:
        """Answer a request of a kind unknown here; anything else unknown ends the worker."""
        try:
            value = json.loads(frame.payload)
            request_id, method = value["id"], value["method"]
        except (ValueError, TypeError, KeyError):
            request_id, method = None, None
        if not isinstance(request_id, int) or value.get("type") != "request":
            self._leave(error)
        self._fail(
            request_id,
            m.WorkerError(
                code="invalid-request",
                message=f"this worker cannot read request {method!r}: {error.message}",
                facts={"method": method, "protocol": [m.PROTOCOL_MIN, m.PROTOCOL_MAX]},
            ),
        )

    def _leave(self, error: ProtocolError) -> None:
        refusal = m.WorkerError(code="protocol-error", message=error.message, facts=error.facts)
        try:
            self._channel.send(m.Refused(error=refusal))
        finally:
            os._exit(EXIT_PROTOCOL_BREACH)

    def _beat(self) -> None:
        pause = threading.Event()
        while True:
            beat = m.Heartbeat(
                state="busy" if self._busy else "idle",
                progress=self._progress,
                resident_bytes=resident_bytes(),
            )
            try:
                self._channel.send(beat)
            except OSError:
                return
            pause.wait(HEARTBEAT_INTERVAL_S)

    def _take_messages(self, *, wait: bool) -> None:
        self._busy = not wait
        while not self._stopping:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return
            self._busy = True
            wait = False
            if isinstance(message, m.Request):
                self._begin(message)
            elif isinstance(message, m.Cancel):
                self._cancel(message.id)
            elif isinstance(message, m.Shutdown):
                self._stopping = True
            else:
                self._leave(ProtocolError("bad-message", "a second host_hello after the handshake"))

    # --- requests --------------------------------------------------------------------------

    def _begin(self, request: m.Request) -> None:
        backend = self._backend
        try:
            if self._refusal is not None and request.method not in _CHECKS:
                self._fail(request.id, self._refusal)
            elif request.method == "self_test":
                self._answer(request.id, backend.self_test(m.SelfTestParams(**request.params)))
            elif request.method == "unload":
                self._answer(request.id, backend.unload(m.UnloadParams(**request.params)))
            else:
                self._running[request.id] = self._open(request)
        except Exception as error:  # noqa: BLE001  the one place where a backend's errors end
            self._fail(request.id, _as_worker_error(error))
        self._progress += 1

    def _open(self, request: m.Request) -> _Running:
        params = _parameters_of(request.method)(**request.params)
        stream: Stream = getattr(self._backend, request.method)(params)
        wanted = 1
        if request.method == "evaluate":
            wanted = len(request.params["sequences"])
        elif request.method == "train_evaluate":
            wanted = len(request.params["examples"])
        return _Running(request.method, stream, wanted)

    def _step(self, request_id: int) -> None:
        running = self._running[request_id]
        if running.method != "generate":
            # A turn of this may take seconds; one of a generation is at most the step that all wait for.
            self._write_held()
        try:
            reply = next(running.stream)
            if reply is not None:
                final = reply.result is not None and running.is_final(reply.result)
                self._send(request_id, reply, final=final)
                if final:
                    del self._running[request_id]
                    _finish(running.stream)
        except StopIteration:
            del self._running[request_id]
            self._fail(request_id, _incomplete(running))
        except Exception as error:  # noqa: BLE001  the one place where a backend's errors end
            self._running.pop(request_id, None)
            self._fail(request_id, _as_worker_error(error))
        self._progress += 1

    def _cancel(self, request_id: int) -> None:
        running = self._running.pop(request_id, None)
        if running is None:
            return
        _close(running.stream)
        self._fail(request_id, m.WorkerError(code="cancelled", message="the request was cancelled"))

    def _answer(self, request_id: int, reply: Reply) -> None:
        self._send(request_id, reply, final=True)

    def _send(self, request_id: int, reply: Reply, *, final: bool) -> None:
        token_id = None if final else _only_token(reply)
        if token_id is not None:
            self._held.append(encode_token(request_id, token_id))
            return
        event = m.Event(
            id=request_id,
            final=final,
            result=None if reply.result is None else reply.result.model_dump(mode="json"),
            observation=reply.observation or None,
            slices=len(reply.slices),
        )
        self._transmit(event, reply.slices)

    def _fail(self, request_id: int, error: m.WorkerError) -> None:
        self._transmit(m.Failed(id=request_id, error=error))

    def _transmit(self, message: m.Message, slices: tuple[bytes, ...] = ()) -> None:
        frames = [encode_message(message), *(encode_frame("B", piece) for piece in slices)]
        self._held += frames
        self._write_held()

    def _write_held(self) -> None:
        if not self._held:
            return
        data = b"".join(self._held)
        self._held.clear()
        try:
            self._channel.write(data)
        except OSError:
            os._exit(EXIT_HOST_GONE)


def _only_token(reply: Reply) -> int | None:
    """Return the one token that a reply consists of; None: there is more to it."""
    result = reply.result
    if reply.observation or reply.slices or type(result) is not m.GenerateResult:
        return None
    # By what was set, so that a field which this module has not heard of counts too.
    if result.model_fields_set != _ONLY_TOKENS or len(result.tokens) != 1:
        return None
    token = result.tokens[0]
    return token.token_id if type(token) is m.GeneratedToken and token.model_fields_set == _ONLY_ID else None


_ONLY_TOKENS = frozenset({"tokens"})
_ONLY_ID = frozenset({"token_id"})


def _parameters_of(method: m.Method) -> type[m.Message]:
    """Return what a method that answers with a stream takes."""
    served: dict[str, type[m.Message]] = {
        "load_model": m.LoadModelParams,
        "generate": m.GenerateParams,
        "evaluate": m.EvaluateParams,
        "trace": m.TraceParams,
        "conformance": ConformanceParams,
    }
    if method in served:
        return served[method]
    # Imported when they are asked for: a worker that serves starts without them.
    if method == "merge_adapter":
        from vox_plugin_api.merge_messages import MergeParams

        return MergeParams
    from vox_plugin_api import train_messages as t

    trained: dict[str, type[m.Message]] = {
        "train_plan": t.TrainPlanParams,
        "train_begin": t.TrainBeginParams,
        "train_step": t.TrainStepParams,
        "train_evaluate": t.TrainEvaluateParams,
        "train_save": t.TrainSaveParams,
    }
    return trained[method]


def internal_error(error: BaseException) -> m.WorkerError:
    """Return an unexpected exception as data; its traceback goes to stderr, into the log."""
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    kind = type(error).__name__
    return m.WorkerError(
        code="internal",
        message=f"unexpected {kind} in the backend: {error}",
        facts={"exception": kind},
        remedy="The worker's log has the traceback; please report it to the plugin's author.",
    )


def _as_worker_error(error: Exception) -> m.WorkerError:
    if isinstance(error, BackendError):
        return error.error
    if isinstance(error, ValidationError):
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        lines = [f"{'.'.join(str(part) for part in p['loc'])}: {p['msg']}" for p in problems]
        return m.WorkerError(
            code="invalid-params",
            message=f"the parameters are not right: {'; '.join(lines)}",
            facts={"problems": lines},
        )
    if isinstance(error, ProtocolError):
        return m.WorkerError(code=error.code, message=error.message, facts=error.facts)
    return internal_error(error)


def _incomplete(running: _Running) -> m.WorkerError:
    return m.WorkerError(
        code="incomplete-answer",
        message=f"the backend ended its answer to {running.method!r} before it was complete",
        facts={"method": running.method, "results": running.results},
    )


def _finish(stream: Stream) -> None:
    """Let a generator that has said everything run its last lines."""
    try:
        next(stream, None)
    except Exception as error:  # noqa: BLE001  the answer is complete; the log gets the rest
        internal_error(error)
    _close(stream)


def _close(stream: Stream) -> None:
    close: Callable[[], Any] | None = getattr(stream, "close", None)
    if close is None:
        return
    try:
        close()
    except Exception as error:  # noqa: BLE001  the request has ended; the log gets the rest
        internal_error(error)
